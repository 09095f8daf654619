"""Base of the configuration of engines with their own arguments and processes: `strategy_config` of vLLM and SGLang."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from roll_core.errors import ConfigError, ConfigProblem
from roll_core.spec.config import PositiveInt, StrategyConfig
from roll_modeling.model_table import check_positions, check_tried

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

ONE_SLOT = "adapters over several slots are not supported: the loaded adapter could not be read back"


class EngineConfig(StrategyConfig):
    """Engine arguments by the engine's own names, except those that ROLL sets itself."""

    engine: ClassVar[str]
    """Name of the engine in messages."""
    own_keys: ClassVar[tuple[str, ...]] = ("bucket_mib", "sleep_level")
    """Keys that belong to ROLL and are not passed to the engine."""
    rejected: ClassVar[Mapping[str, str]]
    """Arguments that ROLL sets itself or does not support, each with the reason that follows its name in the error."""
    length_key: ClassVar[str]
    """Key with the maximum sequence length."""

    load_format: str = "auto"
    """How to load the model's files at the start. `dummy` initializes random weights, which the first weight update
    replaces."""
    enable_lora: bool = False
    """Serve the trained LoRA adapter on top of the initial base model; a weight update sends only A and B. If false, a
    weight update sends merged weights."""
    sleep_level: Literal[0, 1, 2] = 1
    """What the engine releases while other roles use the slots. 0: nothing. 1: the KV cache, and weights are offloaded
    to the host. 2: the KV cache and the weights, which the next weight update sends anyway. On a CPU the engine
    releases only the KV cache."""
    bucket_mib: PositiveInt = 64
    """Size in MiB of the buckets in which a weight update is sent to the engine processes. A larger tensor gets its own
    bucket."""

    @model_validator(mode="after")
    def _check_rejected(self) -> EngineConfig:
        for name in sorted(self.model_fields_set & self.rejected.keys()):
            raise ValueError(f"{name} {self.rejected[name]}")
        if self.enable_lora and (problem := self.adapter_problem()):
            raise ValueError(f"enable_lora: {problem}")
        return self

    def adapter_problem(self) -> str:
        """Reason why the other keys do not permit an adapter; empty if they do."""
        if self.load_format == "dummy":
            return "load_format: dummy would leave random weights in the base model"
        if self.sleep_level == 2:
            return "sleep_level 2 would lose the base model's weights, which no weight update sends; use 1"
        return ONE_SLOT if (self.slots_per_worker() or 1) > 1 else ""

    def serves_adapters(self) -> bool:
        """True if `enable_lora` is set."""
        return self.enable_lora

    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        """Raise `ValueError` if the package's table says that the engine does not run models of this type.

        Returns a warning for a type that was never tried.
        """
        return check_tried(keys, type(self).__module__.partition(".")[0], "start", "decode")

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the package's table says that weights of this type cannot be published."""
        check_tried(keys, type(self).__module__.partition(".")[0], "publish")

    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        """Raise `ValueError` if prompt plus response exceeds the model's table of positions."""
        check_positions(keys, prompt, response)

    def check_lengths(self, prompt: int, response: int) -> None:
        """Raise `ValueError` if prompt plus response exceeds the maximum sequence length."""
        limit = getattr(self, self.length_key)
        if limit is not None and limit < prompt + response:
            raise ValueError(
                f"{self.length_key} {limit} is less than a prompt of {prompt} and a response of {response} tokens"
                f" = {prompt + response}"
            )

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments passed to the engine: keys that are set or have a default other than None."""
        arguments = {name: getattr(self, name) for name in type(self).model_fields if name not in self.own_keys}
        return {name: value for name, value in arguments.items() if value is not None or name in self.model_fields_set}


def check_arguments(engine: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for arguments that the installed engine lacks; `check` may know those of another release."""
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            problems.append(
                ConfigProblem(
                    where="strategy_config",
                    key=name,
                    message=f"the installed {engine} has no such argument",
                    hint=f"did you mean {close[0]}?" if close else "",
                    code="ROLL-C010",
                )
            )
    if problems:
        raise ConfigError(problems)
