"""What is computed, and where: the model of a role and the place of a worker among its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import Store  # type: ignore[attr-defined]

    from roll_core.spec.providers import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters (arXiv:2106.09685): the weight W of a target acts as W + scale · B A, and only A and B are
    trained."""

    targets: str | tuple[str, ...]
    """Linear layers by their path or its end, `("q_proj", "v_proj")`; `("all-linear",)` is all of them but the head;
    a string is a regular expression for whole paths."""
    rank: int
    """Rows of A and columns of B."""
    alpha: float
    extra_modules: tuple[str, ...] = ()
    """Modules, named like targets, that are trained in full beside the adapters. A value or reward head always is."""
    export: Literal["merged", "adapter"] = "merged"
    """What `export_model` writes: a whole model, or the adapters alone as peft stores them."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: a Hugging Face directory or hub id, or random weights for an architecture. Exactly one of both is
    given."""

    task: Task = "causal_lm"
    path: str = ""
    """Directory or hub id."""
    random_init: Mapping[str, Any] | None = None
    """Keys of a transformers config, with `model_type`; weights are drawn from `seed`."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys set on the loaded config (`model_config_kwargs`)."""
    dtype: str = "fp32"
    """Of the computation: `fp32`, `bf16` or `fp16`."""
    attn_implementation: str = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    tokenizer: str = ""
    """Directory that `transformers.AutoTokenizer` loads; the model's embedding has at least its size."""
    trust_remote_code: bool = False
    lora: LoraSpec | None = None
    """Train adapters instead of the weights, or serve those that another role trains. Given only to strategies with
    `capabilities.lora`."""
    router_replay: bool = False
    """The experts that the engine chooses are replayed in training: an engine makes ready to return them, a trainer to
    take them. Given only to strategies with `capabilities.routed_experts` and `capabilities.router_replay`. `start` and
    `build` raise `UnsupportedError`, which names the architecture, where the model has no experts or its routers are
    not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshInfo:
    """Where a worker of a role stands. A strategy forms its own process groups from it."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    """A torch device string."""
    backend: str = "gloo"
    """Collective backend of the platform."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Free port on rank 0's host, the same for all ranks; 0 where `world_size` is 1."""
    open_store: Callable[[], Store] | None = field(default=None, compare=False, repr=False)
    """Open the store from which `init_process_group` makes a group. It listens on `master_addr` at `master_port`, and
    clients authenticate. Rank 0 hosts it; the others block until it does. Call it at most once, keep the store as long
    as the group, then `close` it. None if no run started the ranks, as in tests."""
    num_slots: int = 1
    """Slots of this worker (`num_gpus_per_worker`)."""
    num_threads: int = 0
    """Threads for computation on the host; 0 leaves the library's choice."""
    timeout_s: float = 600.0
    """Of collectives."""
    sampling_seed: int = 0
    """63 bits for what is drawn for requests without a seed: others for each worker that generates, and each time it
    starts. With the same ones two replicas, or a resumed run and the one before it, would draw the same numbers."""


document_fields(__name__)
