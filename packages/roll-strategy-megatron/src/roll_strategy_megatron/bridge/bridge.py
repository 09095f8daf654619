"""Conversion of weights between a Hugging Face model and Megatron's shards, one tensor at a time.

    files --join--> full --cut--> shard                     each rank reads the tensors of its own shards
    shard --gather over TP, EP--> full --split--> parts --over PP--> all ranks, in the order of the Hugging Face model

Tensors with the layout of the weights, such as Adam moments, are converted in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_core.errors import ModelError
from roll_modeling.pieces import mtp_tensors
from roll_strategy_megatron.bridge.rules import Rule
from roll_strategy_megatron.bridge.transforms import Copy
from roll_strategy_megatron.parallel import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from roll_strategy_megatron.bridge.rules import Architecture
    from roll_strategy_megatron.bridge.source import Source
    from roll_strategy_megatron.bridge.transforms import Sizes
    from roll_strategy_megatron.model import PackedModel
    from roll_strategy_megatron.parallel import Parallel

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
ENGINE_NAMES = tuple(
    (re.compile(rf"(decoder\.layers\.\d+\.){theirs}"), rf"\g<1>{ours}")
    for theirs, ours in (
        (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
        (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attention.\g<2>_layernorm.weight"),
        (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", r"mlp.experts.local_experts.\g<3>.\g<2>.weight"),
    )
)
"""Names of Transformer Engine's parameters, and of Megatron's own layers, which rules and checkpoints use."""
OUTPUT, TIED = "output_layer.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SHOWN = 5
"""Maximum number of names in an error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A parameter of this rank, and the tensor that it is a shard of."""

    parameter: nn.Parameter
    rule: Rule
    layer: int
    """Layer index over all stages; -1 outside the layers."""
    expert: int
    """Expert index over all ranks; -1 if the parameter belongs to no expert."""


class Bridge:
    """Bridge between one Hugging Face model, of which only names and shapes are used, and this rank's model chunks."""

    def __init__(
        self,
        architecture: Architecture,
        hf: PreTrainedModel,
        runs: Sequence[PackedModel],
        sizes: Sizes,
        parallel: Parallel,
        scalar_head: str = "",
    ) -> None:
        """Match parameters with rules. Collective over the stages.

        `scalar_head` is the name of the weight that replaces the output layer's, if any. Raises `ModelError` for
        parameters without a rule, on either side.
        """
        self.architecture, self.hf, self.sizes, self.parallel = architecture, hf, sizes, parallel
        self.rules = tuple(
            Rule(mcore=OUTPUT, hf=(scalar_head,), transform=Copy()) if scalar_head and rule.mcore == OUTPUT else rule
            for rule in architecture.rules
        )
        self.num_layers: int = hf.config.num_hidden_layers
        self.num_experts: int = runs[0].config.num_moe_experts or 0
        self.shapes = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
        self.tied = bool(hf.config.tie_word_embeddings) and not scalar_head
        self.head = EMBEDDING if self.tied else TIED
        """Name of the output layer's weight."""
        self.spare = {TIED} if self.tied or (scalar_head and scalar_head != TIED) else set()
        self.held = [self._placed(run, name, parameter) for run in runs for name, parameter in run.named_parameters()]
        for shard in self.held:
            mark(shard.parameter, shard.rule, parallel)
        self.groups = self._groups()
        self.stages = self._stages()
        self.buffers = self._buffers(runs)

    # -- what belongs together -----------------------------------------------------------------------------------------

    def _placed(self, run: PackedModel, name: str, parameter: nn.Parameter) -> Shard:
        """Match a parameter with its rule. Indices in `name` are local to the chunk and the rank."""

        def expert(match: re.Match[str]) -> str:
            num_local = self.num_experts // self.parallel.ep.size()
            return f".local_experts.{self.parallel.ep.rank() * num_local + int(match[1])}."

        full_name = EXPERT.sub(expert, _over_stages(run, name))
        for rule in self.rules:
            match = rule.pattern.fullmatch(full_name)
            if match is not None:
                numbers = match.groupdict()
                return Shard(
                    parameter=parameter,
                    rule=rule,
                    layer=int(numbers.get("layer") or 0) if "layer" in numbers else -1,
                    expert=int(numbers["expert"]) if "expert" in numbers else -1,
                )
        raise ModelError(f"the bridge has no rule for Megatron's tensor {full_name}")

    def _buffers(self, runs: Sequence[PackedModel]) -> dict[str, Tensor]:
        """This rank's buffers of the architecture's rules, by Hugging Face names."""
        known = {
            _named(rule.mcore, layer, -1): _named(rule.hf, layer, -1)
            for rule in self.architecture.buffers
            for layer in range(self.num_layers)
        }
        mine = {_over_stages(run, name): buffer for run in runs for name, buffer in run.named_buffers()}
        return {known[name]: buffer for name, buffer in mine.items() if name in known}

    def _groups(self) -> dict[str, tuple[Rule, int]]:
        """Rule and layer of each parameter of the Hugging Face model, in its order."""
        known: dict[str, tuple[Rule, int]] = {}
        for rule in self.rules:
            for layer in range(self.num_layers) if "{layer}" in rule.mcore else (-1,):
                names = self._hf_names(rule, layer)
                if all(name in self.shapes for name in names):  # layers may differ
                    for name in names:
                        known.setdefault(name, (rule, layer))
        _refuse("the bridge has no rule for", [name for name in self.shapes if name not in known])
        mine = [name for shard in self.held for name in self._hf_names(shard.rule, shard.layer)]
        lacking = sorted({name for name in mine if name not in self.shapes})
        _refuse("the model lacks", lacking)
        return {name: known[name] for name in self.shapes}

    def _hf_names(self, rule: Rule, layer: int) -> list[str]:
        names = [template.replace("{layer}", str(layer)) for template in rule.hf]
        return [EMBEDDING if self.tied and hf_name == TIED else hf_name for hf_name in names]

    def _stages(self) -> dict[tuple[str, int], int]:
        """The stage that has the parameters of each rule and layer; the first, if two stages have a copy."""
        mine = {(shard.rule.mcore, shard.layer) for shard in self.held}
        every: list[set[tuple[str, int]]] = [mine] * self.parallel.pp.size()
        if self.parallel.pp.size() > 1:
            dist.all_gather_object(every, mine, group=self.parallel.pp)
        return {key: stage for stage in reversed(range(len(every))) for key in every[stage]}

    # -- in ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, source: Source, dtype: torch.dtype) -> None:
        """Read this rank's shards, rounded to `dtype`.

        Raises `ModelError` for missing tensors, wrong shapes, and unused tensors.
        """
        self._check(source)
        for held in self.by_rule().values():
            self._load(held, source, dtype)
        for name, stored in self._stored_buffers(source).items():
            self.hf.get_buffer(name).copy_(source.get(stored))
        self.load_buffers(self.hf.get_buffer)

    @torch.no_grad()
    def load_buffers(self, get: Callable[[str], Tensor]) -> None:
        """Set this rank's buffers; `get` returns full tensors by Hugging Face names."""
        for name, buffer in self.buffers.items():
            buffer.copy_(get(name))

    def _load(self, held: Sequence[Shard], source: Source, dtype: torch.dtype) -> None:
        """Read the parameters in one entry of `by_rule`. Tensors of all experts of a layer are read once."""
        rule, layer = held[0].rule, held[0].layer
        stacked: list[Tensor] = []
        if rule.is_expert and not self._kept_apart(rule, layer, source):
            stacked = [source.get(name) for name in self._hf_names(rule, layer)]
        for shard in held:
            shard.parameter.copy_(self._read(shard, source, stacked).to(dtype))

    def _read(self, held: Shard, source: Source, stacked: Sequence[Tensor]) -> Tensor:
        """Read one shard, or cut it from `stacked`. Only the tensors of its rule are in memory meanwhile."""
        if stacked:
            return self.share(held, [stack[held.expert] for stack in stacked])
        names = self._source_names(held.rule, held.layer, held.expert, source)
        return self.share(held, [source.get(name) for name in names])

    def share(self, held: Shard, parts: Sequence[Tensor]) -> Tensor:
        """This rank's shard of Hugging Face's full tensors. Raises `ModelError` for wrong shapes."""
        group = self.parallel.etp if held.rule.is_expert else self.parallel.tp
        full = held.rule.transform.join(parts, self.sizes)
        cut = held.rule.transform.cut(full, group.rank(), group.size())
        if cut.numel() != held.parameter.numel():
            raise ModelError(
                f"{', '.join(self._hf_names(held.rule, held.layer))}: {[tuple(part.shape) for part in parts]} in the"
                f" files make {tuple(cut.shape)} on this rank, but the model that config.json describes has"
                f" {tuple(held.parameter.shape)}"
            )
        return cut.reshape(held.parameter.shape)

    def by_rule(self) -> dict[tuple[str, int], list[Shard]]:
        """This rank's parameters by rule name and layer; the experts of a layer are in one list."""
        shards: dict[tuple[str, int], list[Shard]] = {}
        for shard in self.held:
            shards.setdefault((shard.rule.mcore, shard.layer), []).append(shard)
        return shards

    def shares_of(self, held: Sequence[Shard], get: Callable[[str], Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The shards of the parameters in one entry of `by_rule`.

        `get` returns full tensors by transformers' names; it is called once per name.
        """
        parts = [get(name) for name in self._hf_names(held[0].rule, held[0].layer)]
        for shard in held:
            yield (
                shard.parameter,
                self.share(shard, [part[shard.expert] for part in parts] if shard.expert >= 0 else parts),
            )

    def _kept_apart(self, rule: Rule, layer: int, source: Source) -> bool:
        return bool(rule.stored) and _named(rule.stored[0], layer, 0) in source.names

    def _source_names(self, rule: Rule, layer: int, expert: int, source: Source) -> list[str]:
        if self._kept_apart(rule, layer, source):
            return [_named(template, layer, expert) for template in rule.stored]
        return self._hf_names(rule, layer)

    def _check(self, source: Source) -> None:
        expected: set[str] = set()
        for rule, layer in dict.fromkeys(self.groups.values()):
            for expert in range(self.num_experts) if rule.is_expert else (-1,):
                expected.update(self._source_names(rule, layer, expert, source))
        stored = self._stored_buffers(source)
        expected.update(stored[name] for name in self.buffers)
        _refuse("the files lack", sorted(expected - source.names))
        expected.update(stored.values())
        ignored = [re.compile(pattern) for pattern in self.architecture.ignored]
        left = source.names - expected - self.spare
        left -= set(mtp_tensors(left, self.hf.config.to_dict()))
        _refuse(
            "the files have unused tensors:",
            sorted(name for name in left if not any(pattern.fullmatch(name) for pattern in ignored)),
        )

    def _stored_buffers(self, source: Source) -> dict[str, str]:
        """Names in the source of the buffers of transformers' model that the architecture's rules describe."""
        stored_names: dict[str, str] = {}
        described = {name for name, _ in self.hf.named_buffers()}
        for rule in self.architecture.buffers:
            for layer in range(self.num_layers):
                name, stored = _named(rule.hf, layer, -1), _named(rule.stored, layer, -1)
                if name in described:
                    stored_names[name] = stored if stored in source.names else name
        return stored_names

    # -- out -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def export(
        self, read: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors on every rank, by the names and in the order of transformers' model, as new tensors.

        Collective.

        `read` returns the tensor to export for a parameter, such as a moment, in the parameter's shape and in `dtype`.
        At most the tensors of one rule and layer are in memory. `only` restricts the names.
        """
        pending: dict[str, Tensor] = {}
        mine = self.by_rule()
        for name, (rule, layer) in self.groups.items():
            if only is not None and name not in only:
                continue
            if name not in pending:
                names = self._hf_names(rule, layer)
                stage = self.stages[(rule.mcore, layer)]
                if stage == self.parallel.pp.rank():
                    parts = self._parts(rule, mine[(rule.mcore, layer)], read)
                else:
                    parts = [torch.empty(self.shapes[part], dtype=dtype, device=self.parallel.device) for part in names]
                tensors = (self.parallel.from_stage(part.contiguous(), stage) for part in parts)
                pending.update(zip(names, tensors, strict=True))
            yield name, pending.pop(name)

    @torch.no_grad()
    def export_stage(self, read: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """As `export`, but each stage yields only its own tensors. Over all stages each tensor is yielded once.

        Collective over the ranks of a stage.
        """
        here, mine = self.parallel.pp.rank(), self.by_rule()
        for rule, layer in dict.fromkeys(self.groups.values()):
            if self.stages[(rule.mcore, layer)] == here:
                parts = self._parts(rule, mine[(rule.mcore, layer)], read)
                yield from zip(self._hf_names(rule, layer), parts, strict=True)

    def _parts(self, rule: Rule, held: Sequence[Shard], read: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
        """Hugging Face's tensors, gathered from the shards of the ranks of this stage."""
        if not rule.is_expert:
            return self._split(rule, read(held[0].parameter), self.parallel.tp)
        in_order = sorted(held, key=lambda shard: shard.expert)
        stacked: list[Tensor] = []
        for index, shard in enumerate(in_order):
            parts = self._split(rule, read(shard.parameter), self.parallel.etp)
            stacked = stacked or [part.new_empty(len(in_order), *part.shape) for part in parts]
            for stack, part in zip(stacked, parts, strict=True):
                stack[index] = part
        return [joined(stack, self.parallel.ep, 0) for stack in stacked]

    def _split(self, rule: Rule, share: Tensor, group: Any) -> list[Tensor]:
        transform = rule.transform
        shaped = share.reshape(transform.whole_shape(share, group.size(), self.sizes))
        full = shaped if transform.tp_dim is None else joined(shaped, group, transform.tp_dim)
        parts = transform.split(full, len(rule.hf), self.sizes)
        return [part.clone() if part.data_ptr() == share.data_ptr() else part for part in parts]


def mark(parameter: Any, rule: Rule, parallel: Parallel) -> None:
    """Set the attributes by which Megatron reduces a parameter's gradient and counts it in the gradient norm.

    Call before the model is wrapped in `DistributedDataParallel`.
    """
    cut = rule.transform.tp_dim is not None
    if not rule.is_expert:
        # Megatron sets this when it initializes weights, which is skipped here.
        parameter.tensor_model_parallel = cut
        return
    # Megatron sets this only with expert parallelism. Other experts it treats like dense layers, which is wrong if
    # expert_tensor_parallel_size differs from tensor_model_parallel_size.
    parameter.allreduce = False
    # Megatron counts a replicated parameter on the first rank of the dense tensor-parallel group. Experts have their
    # own group: count their replicated parameters on its first rank instead.
    parameter.tensor_model_parallel = True
    parameter.shared = not cut and parallel.etp.rank() > 0
    # Megatron sets this for biases of experts as well, whose gradients it would then sum over dense ranks.
    parameter.sequence_parallel = False


def _over_stages(run: PackedModel, name: str) -> str:
    """A parameter's name with the layer index over all stages, and as in Megatron's own layers."""

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{run.decoder.layers[int(match[1])].layer_number - 1}."

    return own_name(LAYER.sub(layer, name))


def own_name(name: str) -> str:
    """Map a name of Transformer Engine's parameters to that in Megatron's own layers; other names are unchanged."""
    for pattern, ours in ENGINE_NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            return match.expand(ours)
    return name


def _named(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _refuse(what: str, names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ModelError(f"{what} {shown}{more}")
