"""Hooks of the plugin, which provides importers of other frameworks' configs and their command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CommandProvider, ImporterProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_commands() -> Iterator[CommandProvider]:
    """`roll-core import`, for the importers of any package."""
    yield CommandProvider(
        name="import",
        target="roll_migrate.command:command",
        summary="Convert another framework's config, and report the result for each key",
    )


@hookimpl
def roll_importers() -> Iterator[ImporterProvider]:
    """Importers of the configs of alibaba/ROLL, verl, OpenRLHF and TRL."""
    yield ImporterProvider(
        name="roll",
        target="roll_migrate.roll:import_roll",
        summary="A config of alibaba/ROLL, with its fragments and interpolations resolved",
    )
    yield ImporterProvider(
        name="verl",
        target="roll_migrate.verl:import_verl",
        summary="A config of verl's PPO or SFT trainer, or a script that starts one",
    )
    yield ImporterProvider(
        name="openrlhf",
        target="roll_migrate.openrlhf:import_openrlhf",
        summary="A script that starts OpenRLHF's trainer of PPO, SFT, DPO or reward models",
    )
    yield ImporterProvider(
        name="trl",
        target="roll_migrate.trl:import_trl",
        summary="A Python script, YAML file or command line of TRL's trainers of GRPO, RLOO, SFT, DPO, KTO or rewards",
    )
