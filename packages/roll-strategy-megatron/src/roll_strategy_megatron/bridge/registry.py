"""Registry of architectures: builtin ones, and those of other packages.

A package adds an architecture by an `Architecture` object and an entry point:

    [project.entry-points."roll.megatron_architectures"]
    my_model = "my_package.my_model:ARCHITECTURE"          # the name is the `model_type` of its config.json
"""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.architectures import BUILTIN
from roll_strategy_megatron.config import ENTRY_POINTS as GROUP

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from roll_strategy_megatron.bridge.rules import Architecture


def find_architecture(model_type: str) -> Architecture:
    """The architecture of a `model_type`; those of installed packages override the builtin ones.

    Raises `ModelError` for an unknown one, with the list of known ones.
    """
    brought = {entry.name: entry for entry in entry_points(group=GROUP)}
    if model_type in brought:
        return _loaded(brought[model_type])
    if model_type in BUILTIN:
        return BUILTIN[model_type]
    known = sorted({*BUILTIN, *brought})
    close = difflib.get_close_matches(model_type, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ModelError(
        f"Megatron's bridge has no architecture {model_type!r}, only {', '.join(known)}.{hint} fsdp2_train supports"
        f" any; a package can add one by the entry point {GROUP}"
    )


def _loaded(entry: EntryPoint) -> Architecture:
    from roll_strategy_megatron.bridge.rules import Architecture

    try:
        architecture = entry.load()
    except Exception as error:  # third-party code may raise anything; name the package
        raise ModelError(f"entry point {entry.name} = {entry.value!r} of {GROUP} cannot be loaded: {error}") from error
    if not isinstance(architecture, Architecture):
        raise ModelError(
            f"entry point {entry.name} = {entry.value!r} of {GROUP} is a {type(architecture).__name__}, not an"
            " Architecture"
        )
    return architecture
