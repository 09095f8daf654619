"""The model of a role, and the position of one worker within its role."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from roll_core.spec.providers import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters (arXiv:2106.09685). A target with weight W computes with W + scale · B A. Only A and B are
    trained."""

    targets: str | tuple[str, ...]
    """Linear layers and embeddings, named by their path or its end: `("q_proj", "v_proj")`. `("all-linear",)` selects
    all linear layers except the head. A string is a regular expression that must match the whole path."""
    rank: int
    """Rank of the adapters: rows of A, columns of B."""
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Ranks of some targets. A key is the end of a path, or a regular expression for it, as in peft; the first match
    counts."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Values of alpha of some targets, by keys as in `rank_pattern`."""
    use_rslora: bool = False
    """Scale by `alpha / √rank` instead of `alpha / rank` (rsLoRA, arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the norm of each row of W + scale · B A too (DoRA, arXiv:2402.09353)."""
    parameters: tuple[str, ...] = ()
    """Parameters with adapters that belong to no linear layer, named like `targets`: the tensors of fused experts,
    `("experts.gate_up_proj",)`. Each expert has an A and a B."""
    extra_modules: tuple[str, ...] = ()
    """Modules, named like `targets`, that are trained in full next to the adapters. Value and reward heads always
    are."""
    load_in_4bit: bool = False
    """Store the frozen linear layers in 4 bits (QLoRA, arXiv:2305.14314). Set only for strategies with
    `capabilities.load_in_4bit`."""
    export: Literal["merged", "adapter"] = "merged"
    """What `export_model` writes: the whole model with merged adapters, or only the adapters in peft's format."""

    @property
    def scale(self) -> float:
        """Factor on B A of targets that match no pattern."""
        return self._scale(self.rank, self.alpha)

    @property
    def max_rank(self) -> int:
        """Upper bound of the ranks of all targets."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def rank_of(self, path: str) -> int:
        """Rank of the target at `path`."""
        key = pattern_key(self.rank_pattern, path)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, path: str) -> float:
        """Factor on B A of the target at `path`: alpha / rank, or alpha / √rank with `use_rslora`."""
        key = pattern_key(self.alpha_pattern, path)
        return self._scale(self.rank_of(path), self.alpha if key is None else self.alpha_pattern[key])

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def pattern_key(patterns: Iterable[str], path: str) -> str | None:
    """The first of `patterns` that matches `path` or its end, as peft matches them; None if none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: a Hugging Face directory or hub id (`path`), or random weights for an architecture (`random_init`).
    Exactly one of the two is set."""

    task: Task = "causal_lm"
    path: str = ""
    """Directory or hub id."""
    modelscope_id: str = ""
    """Id of the model on ModelScope if `path` is the driver's download of it. Workers on other hosts download it."""
    random_init: Mapping[str, Any] | None = None
    """Keys of a transformers config, including `model_type`. The weights are initialised randomly from `seed`."""
    library: str = ""
    """`"module:attribute"` of the `ModelLibrary` that loads the model. Empty: transformers."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys to override in the loaded config (`model_config_kwargs`)."""
    dtype: str = "fp32"
    """Dtype of the computation: `fp32`, `bf16` or `fp16`."""
    attn_implementation: str = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    new_head: bool = False
    """Task `reward`: give a model without scoring head a new one, to train it. Otherwise `build` raises `ModelError`,
    because its scores would be random."""
    tokenizer: str = ""
    """Directory that `transformers.AutoTokenizer` loads. The model's embedding has at least as many rows as its
    vocabulary."""
    trust_remote_code: bool = False
    freeze: tuple[str, ...] = ("vision", "projector")
    """Parts of a model with images that are not trained: the encoder of images, and the layers between it and the
    language model."""
    lora: LoraSpec | None = None
    """Train adapters instead of the weights, or serve the adapters that another role trains. Set only for strategies
    with `capabilities.lora`."""
    router_replay: bool = False
    """Prepare router replay: the engine returns the experts it chose, and the trainer uses the same experts. Set only
    for strategies with `capabilities.routed_experts` or `capabilities.router_replay`. `start` and `build` raise
    `UnsupportedError`, which names the architecture, if the model has no experts or its routers are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPart:
    """One node's part of an engine replica over several nodes, and where the parts meet."""

    node_rank: int
    """0 on the node of the `InferStrategy`; the other nodes have an `InferFollower`."""
    num_nodes: int
    master_addr: str
    """Address of the first part's host."""
    master_port: int
    """Free port there, the same for all parts."""
    address: str
    """Address of this part's host."""
    sampling_seed: int
    """`MeshInfo.sampling_seed` of all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshInfo:
    """Position of a worker within its role, and how to reach the other ranks. A strategy creates its process groups
    from it."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    """Torch device string."""
    backend: str = "gloo"
    """Collective backend of the platform."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Free port on rank 0's host, the same for all ranks; 0 if `world_size` is 1."""
    secret: str = field(default="", compare=False, repr=False)
    """Secret that only the ranks of the role know; empty if no run started them, as in tests. With it,
    `roll_weight_transports.rendezvous.open_store` opens the store that `init_process_group` needs."""
    num_slots: int = 1
    """Slots of this worker on its node: `num_gpus_per_worker`, or a part of it if `part` is set."""
    num_threads: int = 0
    """CPU threads for computation; 0 keeps the library's default."""
    timeout_s: float = 600.0
    """Timeout of collectives, in seconds."""
    sampling_seed: int = 0
    """63-bit seed for requests without a seed of their own. It differs between workers and between starts of a worker.
    Otherwise two replicas, or a run before and after a resume, would use the same random numbers."""
    part: ReplicaPart | None = None
    """Set if the replica is on several nodes, see `InferProvider.follower`."""


def is_hub_id(source: str) -> bool:
    """True if `source`, given that no such directory exists, can be an id of the Hugging Face Hub."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def model_keys(model_args: object, pretrain: object) -> Mapping[str, Any]:
    """Keys of a model's transformers config that are known without loading it, from raw `model_args` and `pretrain`.

    Empty for a model that is not named or not local.
    """
    args = model_args if isinstance(model_args, dict) else {}
    keys, overrides = args.get("random_init"), args.get("model_config_kwargs")
    source = args.get("model_name_or_path") or pretrain
    if not isinstance(keys, dict):
        try:
            file = Path(os.path.expanduser(source), "config.json") if isinstance(source, str) else None
            keys = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # reported when the model is built
            keys = {}
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type", ""), str):
        return {}
    return {**keys, **overrides} if isinstance(overrides, dict) else keys


def positions_of(keys: Mapping[str, Any]) -> int | None:
    """Number of positions that a model was trained with, by the keys of its config; None if they do not tell.

    Includes the factor of scaled rotary embeddings.
    """
    text = keys.get("text_config")
    keys = {**keys, **text} if isinstance(text, dict) else keys
    number = keys.get("max_position_embeddings", keys.get("n_positions"))
    rope = keys.get("rope_parameters") or keys.get("rope_scaling")
    factor = rope.get("factor") if isinstance(rope, dict) else None
    if isinstance(number, bool) or not isinstance(number, int):
        return None
    if isinstance(rope, dict) and isinstance(factor, (int, float)):
        original = rope.get("original_max_position_embeddings", number)
        return max(number, int(factor * original)) if isinstance(original, int) else number
    return number


REWARD_MODEL_HINT = "name the export of a reward model, or a sequence classification model with one label"
"""What to do about a model that `reward_model_problem` describes."""


def reward_model_problem(keys: Mapping[str, Any]) -> str:
    """Why a model with these keys in its config has no single score per sequence; empty if it may have one."""
    architectures = keys.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return f"architectures in its config.json is {name}, expected ...ForSequenceClassification"
    labels = keys.get("id2label") or {0: "", 1: ""}  # transformers' default
    if name.endswith("ForSequenceClassification") and len(labels) != 1:
        return f"id2label in its config.json has {len(labels)} labels, expected 1"
    return ""


PROJECTORS = ("projector", "merger", "connector", "aligner")
"""Words in the names of modules between an image encoder and a language model."""


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight matrix of a layer."""

    path: str
    """Path within the layer, for example `self_attn.q_proj`."""
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Sizes of one decoder layer, in numbers of elements."""

    parameters: int
    linears: tuple[Linear, ...] = ()
    """Its matrices, except experts and their router; empty if only the total is known."""
    active_width: int = 0
    """Hidden units of the feed-forward block per token. In a mixture of experts: those of the chosen experts."""
    experts: int = 0
    """Number of parameters of all experts."""
    chosen: int = 0
    """Number of experts per token (top-k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSize:
    """Sizes of a model's image encoder, and of the projector between it and the language model."""

    encoder: int
    """Parameters of the encoder, without those of the projector."""
    projector: int
    """Parameters of the projector."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    patch_elements: int
    """Numbers of the encoder's input per patch."""
    patches_per_token: int
    """Patches that become one token of the language model."""
    pixels_per_token: int = 0
    """Pixels that become one token; 0 if every image is resized to the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a causal language model, or of one with a scalar head."""

    model_type: str
    vocab_size: int
    hidden_size: int
    query_width: int
    """Number of query heads × head size."""
    key_width: int
    """Number of key heads × head size."""
    num_heads: int
    normed_heads: bool
    """True if queries and keys are normalised."""
    max_positions: int
    layers: tuple[LayerSize, ...]
    embedding: int
    head: int
    """Parameters of the output layer; 0 if it is tied to the embedding."""
    final_norm: int
    vision: VisionSize | None = None
    """None for a model of text."""

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        vision = 0 if self.vision is None else self.vision.encoder + self.vision.projector
        language = sum(layer.parameters for layer in self.layers)
        return self.embedding + self.head + self.final_norm + language + vision

    def frozen(self, parts: Sequence[str]) -> int:
        """Parameters of the `parts` of `ModelSpec.freeze`."""
        vision = self.vision
        return 0 if vision is None else vision.encoder * ("vision" in parts) + vision.projector * ("projector" in parts)

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest weight: a matrix of a layer, or the embedding."""
        return max(
            [self.embedding, *(linear.outputs * linear.inputs for layer in self.layers for linear in layer.linears)]
        )

    @property
    def tied(self) -> bool:
        """True if the output layer is tied to the embedding."""
        return self.head == 0


def saved_model(fields: Mapping[str, Any]) -> ModelSpec:
    """Restore a `ModelSpec` from its `asdict` mapping, as read from JSON. Raises `KeyError`, `TypeError`."""
    lora: dict[str, Any] | None = fields["lora"]
    fields = {**fields, "freeze": tuple(fields["freeze"])}
    if lora is None:
        return ModelSpec(**fields)
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in lora.items()}
    return ModelSpec(**{**fields, "lora": LoraSpec(**lists)})


document_fields(__name__)
