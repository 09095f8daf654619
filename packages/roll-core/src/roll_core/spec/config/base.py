"""Base of all configuration schemas, their types, and the schemas of a strategy and of advantage options."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from roll_core.field_docs import document_fields
from roll_core.spec.platform import EnvVar  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from typing import Self

    from roll_core.spec.providers import ModelParallelism
    from roll_core.types import MediaKind

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
AUTO = "auto"
"""Value of `executor` that chooses among the installed executors."""
WeightFormat = Literal["dtype", "fp8", "fp8_per_block"]
"""Format in which an engine receives weights. `dtype`: all tensors in its `model_args.dtype`. `fp8`: the layers'
matrices in E4M3 with one scale per row, all other tensors in that dtype. `fp8_per_block`: the same with one scale per
128 × 128 block, for experts, too."""


def _numbers_as_text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: str(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else entry
        for name, entry in value.items()
    }


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.()-]*$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EnvVars = Annotated[dict[EnvName, EnvValue], BeforeValidator(_numbers_as_text)]
"""Environment variables. Numbers are converted to text."""
Seed = Annotated[int, Field(ge=0, lt=2**64)]
MAX_NAME_BYTES = 255
"""Maximum length of a directory name on common file systems."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Marks a key that is read only if another key of its block is set: `Annotated[float, Needs("use_kl_loss")]`."""

    condition: str
    """Key or property of the block. The marked key is read if its value is true."""
    values: frozenset[str] = frozenset()
    """The marked key is read if the condition is one of these, or a list with one of them."""
    strict: bool = False
    """Refuse the key without the condition. Otherwise `check` warns about it."""
    remedy: str = ""
    """What to do so that the key is read. Default: `set <condition>`."""

    @property
    def meaning(self) -> str:
        """The condition, as in `loss_type kto or dpo`."""
        return f"{self.condition} {' or '.join(sorted(self.values))}".strip()

    def is_met(self, block: Config) -> bool:
        """True if the marked key of this block is read."""
        value = getattr(block, self.condition)
        if not self.values:
            return bool(value)
        return not self.values.isdisjoint(value if isinstance(value, (list, tuple)) else [value])


@dataclass(frozen=True, slots=True)
class MergedOnly:
    """Marks a key of `model_args` with which no engine loads the adapters unmerged."""

    reason: str


class Config(BaseModel):
    """Base of every schema: frozen, rejects unknown keys, does not convert strings to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        validate_default=True,
        defer_build=True,  # a command builds the validators of the schemas it reads
    )

    group_needs: ClassVar[Mapping[type[Config], tuple[Needs, ...]]] = {}
    """Bases whose keys are read only on conditions, with the conditions."""
    switches: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Accepted spellings of ROLL with a switch beside values: for each switch, its keys and their values if they are
    left out. `false` removes the keys."""

    @model_validator(mode="before")
    @classmethod
    def _apply_switches(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for switch in cls.switches.keys() & value.keys():
                if isinstance(value[switch], bool):
                    keys = cls.switches[switch]
                    written = {key: entry for key, entry in value.items() if key != switch}
                    value = (
                        {**keys, **written}
                        if value[switch]
                        else {key: written[key] for key in written if key not in keys}
                    )
        return value

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        for name, message in self.unread_keys(strict=True).items():
            raise invalid(message, getattr(self, name), name)
        return self

    def unread_keys(self, *, strict: bool = False) -> dict[str, str]:
        """Keys that nothing reads, each with what to do. Those with the value of their default do not count, because a
        stored config has all keys."""
        unread: dict[str, str] = {}
        for name, needs in _needs(type(self)):
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if needs.strict == strict and getattr(self, name) != default and not needs.is_met(self):
                unread[name] = f"is not read: {needs.remedy or f'set {needs.meaning}'}, or remove this key"
        return unread


def invalid(message: str, value: Any, *path: str) -> ValidationError:
    """Error at a key below the field, or in the schema, whose validator raises it."""
    problem = PydanticCustomError("value_error", "{message}", {"message": message})  # braces in the message are text
    return ValidationError.from_exception_data("config", [InitErrorDetails(type=problem, loc=path, input=value)])


@cache
def _needs(schema: type[Config]) -> list[tuple[str, Needs]]:
    """Conditions of the keys of a schema, in the order of the keys."""
    by_key = {name: needs for group, needs in schema.group_needs.items() for name in group.model_fields}
    return [
        (name, needs)
        for name, field in schema.model_fields.items()
        for needs in (
            *(annotation for annotation in field.metadata if isinstance(annotation, Needs)),
            *by_key.get(name, ()),
        )
    ]


class StrategyConfig(Config):
    """Base of the schemas that strategies provide for `strategy_args.strategy_config`."""

    def slots_per_worker(self) -> int | None:
        """Slots per worker, if the configuration determines it (tensor × pipeline parallel size); otherwise None."""
        return None

    def several_nodes_problem(self) -> str:
        """Infer strategies with a follower: reason why the slots of a worker must be on one node; empty if they may be
        on several."""
        return ""

    def serves_adapters(self) -> bool:
        """Infer strategies: True if the engine loads trained adapters separately instead of weights with merged
        adapters."""
        return False

    def weight_format(self) -> WeightFormat:
        """Infer strategies: the format in which the engine receives weights. `roll_core.spec.fp8` defines the
        fp8 format; the digests in receipts are those of the fp8 tensors."""
        return "dtype"

    def worker_environment(self) -> tuple[EnvVar, ...]:
        """Environment variables for the strategy's workers, in addition to the platform's, which they override. A value
        in the driver's environment takes precedence unless the variable is required. `system_envs` overrides both."""
        return ()

    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        """Train strategies: configured size of each kind of model parallelism, for example `{"tensor_parallel": 2}`.
        `check` rejects a size above 1 of a kind that the provider does not declare."""
        return {}

    def ranks_per_replica(self) -> int:
        """Train strategies: number of ranks that hold one replica of the model, a divisor of the role's number of
        ranks. The product of `parallel_sizes` without `expert_parallel`, which reuses the same ranks."""
        return prod(size for kind, size in self.parallel_sizes().items() if kind != "expert_parallel")

    def replica_arithmetic(self) -> str:
        """`ranks_per_replica` as a product spelled out by config keys, for error messages."""
        return str(self.ranks_per_replica())

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the model cannot be partitioned or computed as configured; spell out the arithmetic.

        Not called for engines that receive no weights. `keys` are the keys of its transformers config that are known
        before anything is loaded.
        """

    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        """Raise `ValueError` if the installed packages do not support the model's architecture. `keys` as for
        `check_model`. Return a warning for one that may not work, for example because it was never tried; else None.

        Of a role with its own `environment`, whose versions are unknown here, an error becomes a warning. Not called by
        `check --no-files`. Reads the packages' files instead of importing them; `roll_modeling.model_table` helps.
        """
        return None

    def check_adapters(self, keys: Mapping[str, Any], model_args: Mapping[str, Any]) -> str | None:
        """Train strategies: as `check_architecture`, for adapters on a model of this architecture. Called after it if
        the role trains adapters (LoRA). `model_args` are the mapping as written."""
        return None

    def check_scores(self, keys: Mapping[str, Any]) -> str | None:
        """Train strategies: as `check_architecture`, for a reward model of this architecture. Called after it if the
        role trains one."""
        return None

    def key_problems(self, model_type: str, overrides: Mapping[str, Any]) -> Mapping[str, str]:
        """Mistakes in `overrides`, keys of a transformers config that the config sets, each with its reason. Called
        where `check_architecture` is."""
        return {}

    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        """Raise `ValueError`, with the arithmetic, if prompt and response together exceed the positions that the model
        can compute. Called where `check_architecture` is; `keys` as for `check_model`."""

    def check_images(self, keys: Mapping[str, Any], kind: MediaKind, prompt: int) -> None:
        """Infer strategies: raise `ValueError` if the engine does not read images, or videos, with this model, or none
        that fill a prompt of `prompt` tokens. Called for each kind that rows have and the provider reads; `keys` as for
        `check_model`."""

    def check_lengths(self, prompt: int, response: int) -> None:
        """Infer strategies: raise `ValueError`, with the arithmetic, if prompt and response together exceed the
        engine's maximum sequence length. Both are numbers of tokens."""

    def check_model_args(self, model_args: Mapping[str, Any]) -> None:
        """Train strategies: raise `ValueError` if keys of this config conflict with the role's `model_args`, or have no
        effect next to them. `model_args` are the mapping as written."""

    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        """Strategies with router replay: raise `ValueError`, with the requirements, if the strategy cannot return or
        replay the experts of this model. `keys` as for `check_model`; empty if nothing is known."""


PROBE_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.3, "fp8_per_block": 0.3}
"""Default thresholds for random tokens, most of which are unlikely, in nats. docs/guards.md has the measurements."""
GAP_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.1, "fp8_per_block": 0.1}
"""Default thresholds for sampled tokens, in nats."""


class AdvantageOptions(Config):
    """Base of the schemas of `adv_options` (`AdvantageProvider.config`)."""

    @property
    def min_samples(self) -> int:
        """Samples that each prompt needs at least."""
        return 1


document_fields(__name__)
