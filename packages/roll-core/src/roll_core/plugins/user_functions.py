"""Functions of the user in place of a plugin's part: `pg_variant: my_losses:gspo`, `adv_estimator: my_adv:fn`.

The module is imported from the working directory. Parameters after those of the contract are the function's options:
names, types and defaults of `pg_options` and `adv_options`.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import PluginLoadError
from roll_core.plugins.targets import load_target
from roll_core.spec.algorithms import AdvantageEstimator, PolicyLoss, option_parameters
from roll_core.spec.config import Config
from roll_core.spec.providers import AdvantageProvider, PolicyLossProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll_core.spec.providers import Provider

P = TypeVar("P", bound="Provider")

CONTRACTS: dict[type[Provider], type] = {AdvantageProvider: AdvantageEstimator, PolicyLossProvider: PolicyLoss}
"""Kinds of parts that may be a function of the user, with their contracts."""


def user_function(kind: type[P], name: str) -> P | None:
    """Record of the function `module:function`; None if `name` is the name of a part.

    Prepends the working directory to the module path of this process, and so to that of its workers.
    """
    if ":" not in name or kind not in CONTRACTS:
        return None
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return kind(name=name, target=name, summary="A function of the user")


def is_user_function(record: Provider) -> bool:
    """True if `user_function` made the record."""
    return record.name == record.target


def load_user_function(record: Provider) -> Callable[..., Any]:
    """Import the function of a record. Raises `PluginLoadError` if it cannot be imported or called as its contract."""
    function: Callable[..., Any] = load_target(record.target, owner=record.name)
    contract = CONTRACTS[type(record)]
    expected = list(inspect.signature(contract.__call__).parameters.values())[1:]
    try:
        signature = inspect.signature(function)
        required = {name: None for name, each in option_parameters(function, contract).items()}
        signature.bind(*expected, **required)
    except (TypeError, ValueError) as error:
        names = ", ".join(each.name for each in expected)
        raise PluginLoadError(f"{record.target} cannot be called as f({names}, **options): {error}") from error
    return function


def options_schema(record: Provider) -> type[Config]:
    """Schema of a function's options. An option without an annotation has the type of its default.

    Raises `PluginLoadError` if the function cannot be used, or pydantic cannot validate an annotation.
    """
    from pydantic import PydanticUserError, create_model
    from pydantic.errors import PydanticUndefinedAnnotation

    function = load_user_function(record)
    fields: dict[str, Any] = {}
    for name, each in option_parameters(function, CONTRACTS[type(record)]).items():
        guessed = Any if each.default in (None, each.empty) else type(each.default)
        annotation = guessed if each.annotation is each.empty else each.annotation
        fields[name] = (annotation, ... if each.default is each.empty else each.default)
    try:
        schema = create_model("Options", __base__=Config, **fields)
        schema.model_rebuild(_types_namespace=getattr(function, "__globals__", None))
        return schema
    except (PydanticUserError, PydanticUndefinedAnnotation, SyntaxError, TypeError) as error:
        raise PluginLoadError(f"{record.target}: its options cannot be validated: {error}") from error
