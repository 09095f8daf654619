"""Checks of `roll-core doctor` for the libraries that Megatron's layers use if they are installed."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from packaging.version import Version

from roll_core.spec.diagnostics import CheckResult
from roll_strategy_megatron.engine import ENGINE, OLDEST, install
from roll_strategy_megatron.plugin import roll_train_strategies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext, Level


def layers(context: CheckContext) -> Iterator[CheckResult]:
    """Check the installed versions of Transformer Engine and flash-attn, without importing them."""
    asked = _asked(context)
    if context.config is not None and not asked:
        return
    asking = [role for role, choice in asked.items() if choice == ENGINE]
    version = _version("transformer-engine")
    good = version is not None and Version(version) >= Version(OLDEST)
    level: Level = "ok" if good else "error" if asking else "note"
    installed = version or "not installed"
    yield CheckResult(
        level=level,
        subject="transformer-engine",
        found=installed
        if good or asking
        else f"{installed}: layers are Megatron's own, experts are computed one by one",
        wanted=f"{OLDEST} or newer" + (f", of which {', '.join(asking)} asks for layers" if asking else ""),
        remedy="" if good else install(),
    )
    version = _version("flash-attn")
    yield CheckResult(
        level="note" if version is None else "ok",
        subject="flash-attn",
        found=version or "not installed: torch brings kernels of it for Megatron's own layers",
        wanted="of use to Transformer Engine's layers",
    )


def _asked(context: CheckContext) -> dict[str, str]:
    """`transformer_impl` by role, for the roles that run on Megatron in this environment."""
    names = {provider.name for provider in roll_train_strategies()}
    choices: dict[str, str] = {}
    for name, role in context.config.roles().items() if context.config is not None else ():
        strategy = role.strategy_args
        if role.environment is None and strategy is not None and strategy.strategy_name.rpartition("/")[2] in names:
            choices[name] = str(strategy.strategy_config.get("transformer_impl", "auto"))
    return choices


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
