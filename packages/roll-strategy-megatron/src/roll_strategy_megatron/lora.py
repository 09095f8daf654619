"""LoRA on Megatron's layers: targets, peft's parameter names, loading and export.

Targets are matched in transformers' model, as in `roll_modeling.lora`. The bridge maps them to parts of Megatron's
layers. Experts, which transformers stores as one tensor, are targets by their names in checkpoint files: `gate_proj`,
`mlp.experts.up_proj`.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import ModelError, UnsupportedError
from roll_modeling.lora import ADAPTER, add_adapters, base_name, lora_identity, weights_digest
from roll_modeling.model import empty_model
from roll_strategy_megatron.adapters import Adapter, attach, cut_of, partial_factors
from roll_strategy_megatron.bridge.bridge import Bridge, Shard, mark
from roll_strategy_megatron.bridge.rules import Rule
from roll_strategy_megatron.bridge.transforms import Copy, FuseQKV, ShardedParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from roll_core.spec.model import ModelSpec
    from roll_strategy_megatron.bridge.transforms import Transform
    from roll_strategy_megatron.model import PackedModel

EXPERT = "{expert}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A layer with an adapter, by its name in transformers or in checkpoint files."""

    path: str
    """Module path, with `{expert}` for layers of experts."""
    rule: Rule
    """Rule of the layer's weight."""
    layer: int
    part: int
    """Index among the tensors that are fused into Megatron's layer."""
    num_parts: int
    shape: tuple[int, int]
    """Number of outputs O and inputs I."""
    fused: tuple[int, ...] = ()
    """Outputs of each projection, if transformers has fused several into this layer as well."""

    def name(self, side: str) -> str:
        """peft's name of factor A or B (`side`), without the expert index."""
        return f"{self.path.replace(f'{EXPERT}.', '')}.lora_{side}.{ADAPTER}.weight"


class AdapterBridge(Bridge):
    """Bridge for the trained parameters: the LoRA factors of every target, and modules trained in full."""

    def __init__(self, base: Bridge, held: list[Shard], groups: dict[str, tuple[Rule, int]], shapes: dict[str, Any]):
        """Build the bridge from its parts. Collective over the stages."""
        self.sizes, self.parallel, self.num_experts = base.sizes, base.parallel, base.num_experts
        self.tied, self.held, self.groups, self.shapes = False, held, groups, shapes
        self.stages = self._stages()


class Lora:
    """LoRA adapters of one model, whose other parameters are frozen."""

    def __init__(self, runs: Sequence[PackedModel], base: Bridge, spec: ModelSpec) -> None:
        """Add the adapters to the layers. Collective.

        Raises `ModelError` and `UnsupportedError` for targets that are missing in the model or unsupported on
        Megatron's layers.
        """
        if spec.lora is None:
            raise AssertionError("the spec has no adapters")
        self.spec, self.lora, self.base = spec, spec.lora, base
        inside, self.expert_targets = _expert_targets(base, spec)
        # A model on the meta device, only for module names, parameter names and export.
        self.described = add_adapters(empty_model(replace(spec, lora=None)), replace(spec, lora=inside))
        names = self.described.trained()
        self.targets = [*(_target(base, name) for name in names if _side(name) == "A"), *self.expert_targets]
        self.extras = {name: base_name(_plain(name)) for name in names if not _side(name)}
        for run in runs:
            run.requires_grad_(False)
        owners = {
            id(parameter): module for run in runs for module in run.modules() for parameter in module.parameters(False)
        }
        self.adapters: dict[nn.Parameter, Adapter] = {}
        self.originals: dict[nn.Parameter, Tensor] = {}
        held, groups, shapes = self._factors(owners)
        more, more_groups = self._whole_modules(list(names))
        for name in more_groups:
            shapes[name] = tuple(names[name].shape)
        order = [*names, *(name for name in shapes if name not in names)]
        known = groups | more_groups
        self.adapter_bridge = AdapterBridge(
            base, [*held, *more], {name: known[name] for name in order}, {name: shapes[name] for name in order}
        )
        self._draw()

    @property
    def partial(self) -> list[nn.Parameter]:
        """Factors whose gradients are partial sums, see `partial_factors`."""
        return partial_factors(list(self.adapters.values()))

    # -- making --------------------------------------------------------------------------------------------------------

    def _factors(
        self, owners: dict[int, nn.Module]
    ) -> tuple[list[Shard], dict[str, tuple[Rule, int]], dict[str, tuple[int, ...]]]:
        places: dict[tuple[str, int], list[Shard]] = {}
        for shard in self.base.held:
            places.setdefault((shard.rule.mcore, shard.layer), []).append(shard)
        held: list[Shard] = []
        groups: dict[str, tuple[Rule, int]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        rank, experts = self.lora.rank, self.base.num_experts
        for target in self.targets:
            outputs, inputs = target.shape
            rules = _factor_rules(target)
            stack = (experts,) if target.rule.is_expert else ()
            for side, rule in rules.items():
                groups[target.name(side)] = (rule, -1)
                shapes[target.name(side)] = (*stack, rank, inputs) if side == "A" else (*stack, outputs, rank)
            for place in places.get((target.rule.mcore, target.layer), []):
                factors = self._adapter(owners[id(place.parameter)], place, target).add(target.part, rank)
                for (_, rule), factor in zip(rules.items(), factors, strict=True):
                    mark(factor, rule, self.base.parallel)
                    held.append(Shard(parameter=factor, rule=rule, layer=-1, expert=place.expert))
        return held, groups, shapes

    def _adapter(self, linear: nn.Module, place: Shard, target: Target) -> Adapter:
        if place.parameter not in self.adapters:
            group = self.base.parallel.etp if place.rule.is_expert else self.base.parallel.tp
            ranks = group.size()
            sizes = replace(
                self.base.sizes,
                num_heads=self.base.sizes.num_heads // ranks,
                num_groups=self.base.sizes.num_groups // ranks,
            )
            adapter = Adapter(linear, place, target.num_parts, sizes, group, scale=self.lora.scale)
            attach(linear, adapter)
            self.adapters[place.parameter] = adapter
        return self.adapters[place.parameter]

    def _whole_modules(self, names: list[str]) -> tuple[list[Shard], dict[str, tuple[Rule, int]]]:
        """Modules trained in full: their parameters, beside a copy of the original values."""
        held: list[Shard] = []
        groups: dict[str, tuple[Rule, int]] = {}
        by_base = {plain: name for name, plain in self.extras.items()}
        for plain in by_base:
            rule, layer = self.base.groups[plain]
            together = self.base._hf_names(rule, layer)
            lacking = [target for target in together if target not in by_base]
            if lacking:
                raise UnsupportedError(
                    f"additional_target selects {plain} but not {', '.join(lacking)}: Megatron has them in one"
                    " tensor, so select all or none"
                )
            trained = tuple(by_base[target] for target in together)
            joint_rule = Rule(mcore=trained[0], hf=trained, transform=rule.transform)
            groups.update(dict.fromkeys(trained, (joint_rule, -1)))
            for place in self.base.held:
                first = plain == together[0]  # once per fused parameter, which has several names
                if first and place.rule is rule and place.layer == layer:
                    place.parameter.requires_grad_(True)
                    self.originals[place.parameter] = place.parameter.detach().clone()
                    held.append(Shard(parameter=place.parameter, rule=joint_rule, layer=-1, expert=-1))
        return held, groups

    @torch.no_grad()
    def _draw(self) -> None:
        """Initialize A as peft does: uniform in ±1 / sqrt(I).

        Experts' A are sampled from one generator with the model's seed.
        """
        initial = self.described.initial_factors()
        generator = torch.Generator().manual_seed(self.spec.seed)
        for target in self.expert_targets:
            factor = torch.empty(self.adapter_bridge.shapes[target.name("A")])
            initial[target.name("A")] = factor.uniform_(-1.0, 1.0, generator=generator) * target.shape[1] ** -0.5
        for held in self.adapter_bridge.by_rule().values():
            if held[0].rule.hf[0] in initial:
                for parameter, share in self.adapter_bridge.shares_of(held, initial.__getitem__):
                    parameter.copy_(share)

    # -- as others read them -------------------------------------------------------------------------------------------

    def merged(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of a weight with its adapter merged."""
        return self.adapters[parameter].merged() if parameter in self.adapters else parameter.detach()

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """The factors as `TrainStrategy.export_adapters` yields them; B includes the LoRA scale. Collective.

        Raises `UnsupportedError` if modules are trained in full beside the adapters.
        """
        if self.lora.extra_modules:
            raise UnsupportedError(
                f"{', '.join(self.lora.extra_modules)} (additional_target) is trained in full: an engine with only the"
                " adapters would lack it"
            )
        for name, factor in self._factors_of_layers():
            yield name.replace(f".{ADAPTER}.", "."), factor * self.lora.scale if _side(name) == "B" else factor

    def write(self, path: Path, *, leads: bool) -> None:
        """Write the adapters in peft's format; the rank with `leads` writes. Collective."""
        state = {name: factor.cpu() for name, factor in self._factors_of_layers() if leads}
        if leads:
            if self.expert_targets:
                self.described.also_targets(sorted({target.path.rpartition(".")[2] for target in self.expert_targets}))
            self.described.export(path, state)

    def _factors_of_layers(self) -> Iterator[tuple[str, Tensor]]:
        """All trained tensors, with one tensor per expert."""
        paths = {target.name(side): target for target in self.expert_targets for side in "AB"}
        for name, exported in self.adapter_bridge.export(lambda parameter: parameter.detach(), torch.float32):
            if name not in paths:
                yield name, exported
                continue
            target, ending = paths[name], name[name.index(".lora_") :]
            for expert, factor in enumerate(exported):
                yield target.path.replace(EXPERT, str(expert)) + ending, factor

    def identity(self) -> dict[str, Any]:
        """Identity of base model and adapters, as `Adapters.identity` of `roll_modeling.lora`. Collective."""
        if not hasattr(self, "_digest"):
            dtype = next(iter(self.base.held)).parameter.dtype
            base_tensors = self.base.export(lambda parameter: self.originals.get(parameter, parameter).detach(), dtype)
            self._digest = weights_digest((name, tensor.cpu()) for name, tensor in base_tensors)
        return {"base_model": self._digest} | lora_identity(self.lora)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters and restore the original values of modules trained in full, inside the context."""
        trained = {parameter: parameter.detach().clone() for parameter in self.originals}
        self._switch(on=False, numbers=self.originals)
        try:
            yield
        finally:
            self._switch(on=True, numbers=trained)

    @torch.no_grad()
    def _switch(self, *, on: bool, numbers: dict[nn.Parameter, Tensor]) -> None:
        for adapter in self.adapters.values():
            adapter.enabled = on
        for parameter, number in numbers.items():
            parameter.copy_(number)


def _factor_rules(target: Target) -> dict[str, Rule]:
    cut = cut_of(target.rule.transform)
    dims = {"A": 1 if cut == "inputs" else None, "B": 0 if cut == "outputs" else None}
    suffix = f".{EXPERT}" if target.rule.is_expert else ""
    transforms: dict[str, Transform] = {side: Copy(tp_dim=dim) for side, dim in dims.items()}
    if target.fused:
        transforms["B"] = ShardedParts(rows=target.fused)
    return {
        side: Rule(mcore=f"{target.name(side)}{suffix}", hf=(target.name(side),), transform=transform)
        for side, transform in transforms.items()
    }


def _side(name: str) -> str:
    """`A` or `B` for a factor's name; empty for a module trained in full."""
    match = re.search(r"\.lora_([AB])\.", name)
    return match[1] if match else ""


def _plain(name: str) -> str:
    return name.replace(f".modules_to_save.{ADAPTER}.", ".")


def _target(base: Bridge, name: str) -> Target:
    path = name[: name.index(".lora_A.")]
    weight = f"{path}.weight"
    rule, layer = base.groups[weight]
    if layer < 0:
        raise UnsupportedError(f"lora_target: {path} is outside the layers, where adapters are not supported")
    if rule.mcore.endswith("gate_weight"):  # no layer of its own in Megatron
        raise UnsupportedError(f"lora_target: {path}, the gate of a shared expert, cannot have an adapter on Megatron")
    names = base._hf_names(rule, layer)
    outputs, inputs = base.shapes[weight]
    return Target(
        path=path,
        rule=rule,
        layer=layer,
        part=names.index(weight),
        num_parts=len(names),
        shape=(outputs, inputs),
        fused=_fused(base, rule, outputs) if len(names) == 1 else (),
    )


def _fused(base: Bridge, rule: Rule, outputs: int) -> tuple[int, ...]:
    """Outputs of each projection in a layer that both transformers and Megatron have fused; () for other layers."""
    if type(rule.transform) is Copy:
        return ()
    if isinstance(rule.transform, FuseQKV):
        sizes = base.sizes
        return tuple(heads * sizes.head_dim for heads in (sizes.num_heads, sizes.num_groups, sizes.num_groups))
    return (outputs // 2, outputs // 2)


def _expert_targets(base: Bridge, spec: ModelSpec) -> tuple[Any, list[Target]]:
    """The LoRA config without targets that only match experts, and the experts' targets."""
    lora = spec.lora
    if lora is None or isinstance(lora.targets, str) or lora.targets == ("all-linear",):
        return lora, []
    found_targets: list[Target] = []
    of_experts: set[str] = set()
    for rule, layer in dict.fromkeys(base.groups.values()):
        for part, stored in enumerate(rule.stored if rule.is_expert else ()):
            path = stored.replace("{layer}", str(layer)).removesuffix(".weight")
            bare = path.replace(f"{EXPERT}.", "")
            names = [target for target in lora.targets if bare == target or bare.endswith(f".{target}")]
            of_experts.update(names)
            if names:
                outputs, inputs = base.shapes[base._hf_names(rule, layer)[0]][1:]
                if len(rule.stored) > len(rule.hf):
                    outputs //= len(rule.stored)
                found_targets.append(
                    Target(
                        path=path,
                        rule=rule,
                        layer=layer,
                        part=part,
                        num_parts=len(rule.stored),
                        shape=(outputs, inputs),
                    )
                )
    inside = tuple(target for target in lora.targets if target not in of_experts or _names_a_layer(base, target))
    if not inside:
        raise ModelError(
            f"lora_target: {', '.join(sorted(of_experts))} are layers of experts only; add a layer that all tokens"
            " pass through, for example o_proj"
        )
    return replace(lora, targets=inside), found_targets


def _names_a_layer(base: Bridge, name: str) -> bool:
    return any(shape_name == f"{name}.weight" or shape_name.endswith(f".{name}.weight") for shape_name in base.shapes)
