"""Functions of the user in place of a plugin's part: `pg_variant: my_losses:gspo`, `adv_estimator: my_adv:fn`.

`Registry.find` makes their records. Parameters after those of the contract are the function's options: names, types and
defaults of `pg_options` and `adv_options`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from roll_core.errors import PluginLoadError
from roll_core.plugins.signatures import CONTRACTS
from roll_core.plugins.targets import load_target
from roll_core.spec.algorithms import option_parameters
from roll_core.spec.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll_core.spec.providers import Provider


def options_schema(record: Provider) -> type[Config]:
    """Schema of a function's options. An option without an annotation has the type of its default.

    Raises `PluginLoadError` if the function cannot be imported, or called as its contract, or if pydantic cannot
    validate an annotation.
    """
    from pydantic import PydanticUserError, create_model
    from pydantic.errors import PydanticUndefinedAnnotation

    contract = load_target(CONTRACTS[type(record)], owner="roll-core")
    function = _load(record, contract)
    fields: dict[str, Any] = {}
    for name, each in option_parameters(function, contract).items():
        guessed = Any if each.default in (None, each.empty) else type(each.default)
        annotation = guessed if each.annotation is each.empty else each.annotation
        fields[name] = (annotation, ... if each.default is each.empty else each.default)
    try:
        schema = create_model("Options", __base__=Config, **fields)
        schema.model_rebuild(_types_namespace=getattr(function, "__globals__", None))
        return schema
    except (PydanticUserError, PydanticUndefinedAnnotation, SyntaxError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PluginLoadError(f"{record.target}: its options cannot be validated: {reason}") from error


def _load(record: Provider, contract: type) -> Callable[..., Any]:
    function: Callable[..., Any] = load_target(record.target, owner=record.name)
    expected = list(inspect.signature(contract.__call__).parameters.values())[1:]
    try:
        options = dict.fromkeys(option_parameters(function, contract))
        inspect.signature(function).bind(*expected, **options)
    except (TypeError, ValueError) as error:
        names = ", ".join(each.name for each in expected)
        raise PluginLoadError(f"{record.target} cannot be called as f({names}, **options): {error}") from error
    return function
