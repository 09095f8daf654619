"""Low-rank adapters on a Hugging Face model: target layers, the base model without adapters, and merged weights.

    y = x Wᵀ + scale · (x Aᵀ) Bᵀ          merged: W + scale · B A
    DoRA: W' = m ⊙ V / ‖V‖                V = W + scale · B A, norms ‖V‖ and magnitudes m of its rows

peft inserts the layers into the model itself, which keeps its class, forward pass and attributes. The layers are chosen
here, by their whole paths: peft matches names, some of which it takes for the experts' parameters. Call `add_adapters`
after loading, and before anything wraps, shards, fuses or optimises parameters. Everything else works with any storage
of the parameters: for shards, pass a function `full` that returns the whole tensor.

Shapes: I inputs and O outputs of a layer, R rank; W [O, I], A [R, I], B [O, R], m [O]. An embedding has I tokens, and
stores W as [I, O]. Fused experts: E experts, W [E, O, I] or [E, I, O], A [E · R, I], B [O, R · E].
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call

from roll_core.errors import CheckpointError, ModelError, UnsupportedError, WeightSyncError, one_line
from roll_core.spec.model import pattern_key
from roll_core.spec.weights import digest
from roll_modeling.model import empty_model, image_parts, load_tokenizer, moved, quiet, scalar_head, text_parts
from roll_modeling.module_programs import model_library
from roll_modeling.quantization import dequantized, quant_states, quantize_linears

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import LoraSpec, ModelSpec
    from roll_core.spec.module_program import ModelLibrary

ADAPTER = "default"
"""Name of the only adapter in peft."""
ADAPTERS = "adapter_model.safetensors"
"""File name of peft's adapter weights."""
PREFIX = "base_model.model."
"""Prefix of the names in that file."""
FACTORS = {
    f"lora_A.{ADAPTER}.weight": "A",
    f"lora_B.{ADAPTER}.weight": "B",
    f"lora_embedding_A.{ADAPTER}": "A",
    f"lora_embedding_B.{ADAPTER}": "B",
    f"lora_magnitude_vector.{ADAPTER}.weight": "m",
}
"""Symbols of the parameters that peft adds to a layer, by their names in it."""
BASE = "base_model"
"""Key of the base model's digest in the identity of adapters."""
PEFT_WARNINGS = (
    "fan_in_fan_out is set to",  # GPT-2 stores its matrices transposed
    "While injecting the PEFT adapters",  # `target_modules` is empty, because the layers are given by their paths
    "Already found a `peft_config` attribute",  # modules and parameters are injected one after the other
    "The following \\w+_pattern keys did not match",  # `_check_patterns` knows better
)
"""Beginnings of warnings of peft on which users cannot act."""
KERNEL_LAYERS = frozenset({"x_proj", "dt_proj", "out_proj"})
"""Layers of a state-space mixer (Mamba) that its kernels do not call."""


def add_adapters(model: PreTrainedModel, spec: ModelSpec, *, device: str = "cpu") -> Adapters:
    """Add the adapters of `spec.lora` to `model`, and freeze all other parameters.

    One factor is sampled with `spec.seed` and the other is 0, so the model's outputs do not change. Adapters are
    float32 for every dtype of the model. With `load_in_4bit`, frozen linear layers are quantized, and the model moves
    to `device`. Raises `ModelError`, naming the nearest modules, for targets that the model does not have, and
    `UnsupportedError` for a spec without adapters.
    """
    if spec.lora is None:
        raise UnsupportedError("the model's spec has no adapters")
    if spec.lora.load_in_4bit and spec.library:
        raise UnsupportedError("load_in_4bit quantizes only models of transformers: remove it")
    from peft import LoraConfig, inject_adapter_in_model

    extra = _extra_modules(model, spec)
    targets = target_layers(model, spec.lora, extra, library=model_library(spec))
    parameters = _target_parameters(model, spec.lora)
    _refuse_tied(model, [*targets, *extra])
    _check_patterns(spec.lora, [*targets, *parameters])
    names = [name for name, _ in model.named_parameters()]
    base_digest = ""
    if spec.lora.load_in_4bit:
        # Of copies: memory that numpy has read cannot be offloaded.
        base_digest = weights_digest((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
        frozen = target_layers(model, replace(spec.lora, targets=("all-linear",)), extra)
        quantize_linears(model, frozen, device)
        moved(model, device)
    config = LoraConfig(
        base_model_name_or_path=spec.path,
        r=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        rank_pattern=dict(spec.lora.rank_pattern),
        alpha_pattern=dict(spec.lora.alpha_pattern),
        use_rslora=spec.lora.use_rslora,
        use_dora=spec.lora.use_dora,
        lora_dropout=0.0,
        target_modules=_short(model, targets),
        target_parameters=list(spec.lora.parameters) or None,
        modules_to_save=extra or None,
        task_type=_task_type(model, spec),
        inference_mode=True,
    )
    adapted = replace(config, target_modules=[], target_parameters=None, inference_mode=False)
    layers = {f"{path}.lora_A.weight": torch.empty(0) for path in targets}
    with quiet(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="|".join(PEFT_WARNINGS))
        torch.manual_seed(spec.seed)
        try:
            inject_adapter_in_model(adapted, model, ADAPTER, state_dict=layers)
            if parameters:  # peft takes them from the config only
                fused = replace(adapted, target_parameters=parameters, modules_to_save=None)
                inject_adapter_in_model(fused, model, ADAPTER)
        except ValueError as error:
            raise ModelError(f"lora_target: peft cannot adapt {type(model).__name__}: {one_line(error)}") from error
    model.eval()
    adapters = Adapters(model, spec, config, names, base_digest)
    for name, parameter in adapters.trained().items():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return adapters


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable adapters and extra modules inside this context: `model` computes bit for bit as without adapters.

    Raises `UnsupportedError` if the model has no adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} has no adapters that outputs of the base model could leave out")
    with _keeping_gradient_flags(model):
        for layer in layers:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        with _keeping_gradient_flags(model):
            for wrapper in layers:
                wrapper.enable_adapters(True)


@contextmanager
def _keeping_gradient_flags(model: nn.Module) -> Iterator[None]:
    """Restore `requires_grad` on exit: peft freezes disabled adapters, and FSDP2 keeps the flags of its first pass."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    yield
    for parameter, flag in flags:
        parameter.requires_grad_(flag)


class Adapters:
    """Adapters of one model."""

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, config: Any, names: Iterable[str], base_digest: str = ""
    ) -> None:
        """`config` is the exported `LoraConfig` of peft, `names` those of the parameters before `model` got adapters.

        `base_digest` is the digest of these parameters, which is required if they were quantized.

        Raises `UnsupportedError` for `lora_export: adapter` if peft would not load the adapters.
        """
        self.model, self._spec, self._config, self._names = model, spec, config, frozenset(names)
        self.lora = cast("LoraSpec", spec.lora)
        self._base_digest = base_digest
        self._check_loadable()

    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name: A, B and magnitudes of every target, and the copies of extra modules."""
        return {name: parameter for name, parameter in self.model.named_parameters() if _is_adapter(name)}

    def initial_factors(self) -> dict[str, Tensor]:
        """Initial A `[R, I]` of every target by name, equal to those of `add_adapters`.

        For strategies that store the parameters elsewhere, while `model` is on the device `meta`.
        """
        factors: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            for name, a_RI in self.trained().items():
                if f".lora_A.{ADAPTER}." in name:
                    b_OR = self.model.get_parameter(name.replace(".lora_A.", ".lora_B."))
                    # peft creates two layers, each of which samples its weight, and then samples A's again.
                    layer = nn.Linear(a_RI.shape[1], a_RI.shape[0], bias=False)
                    nn.Linear(b_OR.shape[1], b_OR.shape[0], bias=False)
                    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
                    factors[name] = layer.weight.detach()
        return factors

    @torch.no_grad()
    def merged(self, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the model with adapters merged, in the order of its parameters.

        Merged weights are computed in float32, one at a time, and one expert at a time. They are new tensors in the
        weight's dtype. Parameters without an adapter are the live parameters. `full` returns the whole tensor of a
        sharded parameter, and is called on all ranks in the same order. Tied weights appear once. Weights in 4 bits are
        dequantized.
        """
        parameters, states = dict(self.model.named_parameters()), quant_states(self.model)
        if odd := self._names ^ {base_name(name) for name in parameters if not _is_adapter(name)}:
            raise WeightSyncError(
                f"{type(self.model).__name__}: only one of the model with adapters and the model without them has"
                f" {min(odd)}, so merged weights would lack or invent it; please report"
            )
        for name, parameter in parameters.items():
            if _is_adapter(name):
                continue
            if ".original_module." in name:
                copied = parameters[name.replace(".original_module.", f".modules_to_save.{ADAPTER}.", 1)]
                yield base_name(name), full(copied).detach()
            elif owner := self._owner(name):
                factors = {
                    symbol: full(parameters[f"{owner}.{factor}"])
                    for factor, symbol in FACTORS.items()
                    if f"{owner}.{factor}" in parameters
                }
                yield base_name(name), self._merge(dequantized(full(parameter), states.get(name)), owner, factors)
            else:
                yield base_name(name), dequantized(full(parameter).detach(), states.get(name))

    @torch.no_grad()
    def exported(self, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
        """Tensors for `TrainStrategy.export_adapters`: A is the live parameter, B a new tensor that contains the scale.

        Raises `UnsupportedError` if anything else is trained.
        """
        trained = self.trained()
        embedding = next((name for name in trained if ".lora_embedding_" in name), "")
        if other := _not_served(self.lora) or embedding:
            raise UnsupportedError(
                f"{other}: an engine that serves only A and B of linear layers would lack it; set enable_lora: false in"
                " the engine's strategy_config, so that it receives merged weights"
            )
        for name, parameter in trained.items():
            path, _, side = name.rpartition(".lora_")
            tensor = full(parameter).detach()
            if side.startswith("B"):
                tensor = tensor * self.model.get_submodule(path).scaling[ADAPTER]
            yield name.replace(f".{ADAPTER}.", "."), tensor

    def state_dict(self, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
        """Merged weights and the model's buffers under transformers' names. Tied weights appear once."""
        persistent = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}
        return dict(self.merged(full)) | {
            base_name(name): buffer for name, buffer in buffers.items() if not _is_adapter(name)
        }

    def _owner(self, name: str) -> str:
        """Path of the layer of peft that adapts the base parameter `name`; empty if there is none."""
        owner, separator, kind = name.rpartition(".base_layer.")
        # The layers of fused experts are nested, each with one parameter.
        while separator and getattr(self.model.get_submodule(owner), "parameter_name", "weight") != kind:
            owner, separator, _ = owner.rpartition(".base_layer")
        return owner if separator else ""

    def _merge(self, weight: Tensor, owner: str, factors: Mapping[str, Tensor]) -> Tensor:
        """`weight` with the adapter of the layer at `owner`; `factors` are whole tensors, by their symbols."""
        layer: Any = self.model.get_submodule(owner)
        scale, base = layer.scaling[ADAPTER], layer.get_base_layer()
        a_RI, b_OR = factors["A"].float(), factors["B"].float()
        if weight.ndim == 3:
            return _merged_experts(weight, a_RI, b_OR, scale, transposed=getattr(base, "is_transposed", False))
        transposed = layer.fan_in_fan_out or isinstance(base, nn.Embedding)
        delta_OI = (b_OR @ a_RI).mul_(scale)
        merged = (delta_OI.T if transposed else delta_OI).add(weight.float())
        if "m" in factors:
            rows_OI = merged.T if transposed else merged
            rows_OI.mul_((factors["m"].float() / rows_OI.norm(dim=1))[:, None])
        return merged.to(weight.dtype)

    def identity(self, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Any]:
        """Values that must match between saved adapters and this model: base model digest, rank and alpha.

        The digest of the base model's parameter names and bytes is cached, since the base model never changes. With
        `load_in_4bit`, it is that of the unquantized weights.
        """
        if not self._base_digest:
            base = {name: parameter for name, parameter in self.model.named_parameters() if not _is_adapter(name)}
            self._base_digest = weights_digest((base_name(name), full(parameter)) for name, parameter in base.items())
        return {BASE: self._base_digest} | lora_identity(self.lora)

    def check_identity(self, saved: Mapping[str, Any] | None, here: Mapping[str, Any], place: object) -> None:
        """Raise `CheckpointError` unless `saved`, the adapters' identity stored at `place`, equals `here`."""
        if saved is None:
            raise CheckpointError(f"{place}: has a whole model, but this role trains adapters (lora_target)")
        if saved == here:
            return
        if saved.get(BASE) != here[BASE] and saved.get("load_in_4bit") == here.get("load_in_4bit"):
            source = self._spec.path or "the model of random_init"
            raise CheckpointError(f"{place}: its adapters were trained on a base model other than {source}")
        others = [
            ", ".join(f"{key} {value}" for key, value in identity.items() if key != BASE) for identity in (saved, here)
        ]
        raise CheckpointError(
            f"{place}: its adapters have {others[0]}, and this role's {others[1]}: set lora_rank, lora_alpha and"
            " load_in_4bit of model_args to the saved values"
        )

    def also_targets(self, names: Iterable[str]) -> None:
        """Add targets to the exported config, for layers that `model` has as one tensor (experts)."""
        self._config.target_modules = {*self._config.target_modules, *names}

    def _check_loadable(self) -> None:
        """Raise `UnsupportedError` unless peft, given the exported config, adapts the layers that are adapted here.

        In mixtures of experts, peft takes some names of layers for those of the experts' parameters.
        """
        if self.lora.export != "adapter" or not self._spec.path or self._config.task_type is None:
            return
        from peft import inject_adapter_in_model

        model, loaded = empty_model(replace(self._spec, lora=None)), set()
        with quiet(), warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            inject_adapter_in_model(copy.deepcopy(self._config), model, ADAPTER)
            loaded = {name for name, _ in model.named_parameters() if _is_adapter(name)}
        if lost := self.trained().keys() ^ loaded:
            layers = {name.partition(".lora_")[0] for name in lost if name in self.trained()}
            raise UnsupportedError(
                f"lora_export: adapter: peft would not load {min(layers or lost)} of this"
                f" {self.model.config.model_type}, because it takes the name for that of a layer of experts; set"
                " lora_export: merged, or leave the layer out of lora_target"
            )

    def export(self, path: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapters as peft loads them, and tokenizer and generation config of a model of transformers.

        `state` has the trained parameters as whole tensors. It is required for sharded parameters, and for layers that
        `model` has as one tensor (`also_targets`). Raises `UnsupportedError` for a base model of `random_init`.
        """
        if not self._spec.path:
            raise UnsupportedError("adapters can be exported only for a base model with a path, not for random_init")
        path.mkdir(parents=True, exist_ok=True)
        kind = type(self.model)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        self._config.save_pretrained(path, auto_mapping_dict=None if self._config.task_type else mapping)
        tensors = {
            f"{PREFIX}{stored_name(name)}": parameter.detach().to("cpu", copy=True).contiguous()
            for name, parameter in (self.trained() if state is None else state).items()
        }
        save_file(tensors, path / ADAPTERS, metadata={"format": "pt"})
        if not self._spec.library:
            load_tokenizer(self._spec).save_pretrained(path)
            if (settings := getattr(self.model, "generation_config", None)) is not None:
                settings.save_pretrained(path)  # it has the trained end tokens, which the base model may lack


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of a model's names and bytes, in this order."""
    listed = [f"{name} {digest(tensor)}" for name, tensor in weights]
    return digest(torch.frombuffer(bytearray("\n".join(listed).encode()), dtype=torch.uint8))


def lora_identity(lora: LoraSpec) -> dict[str, Any]:
    """Values of `lora` that saved adapters must have too: those that determine the scales of B A and the weights W."""
    identity: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha}
    for key in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "load_in_4bit"):
        if value := getattr(lora, key):
            identity[key] = dict(value) if isinstance(value, Mapping) else value
    return identity


def base_name(name: str) -> str:
    """Name of a parameter or buffer in the model without adapters."""
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", name)


def stored_name(name: str) -> str:
    """Name of a trained parameter in peft's file, after its prefix."""
    plain = name.replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}", "")
    return plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _is_adapter(name: str) -> bool:
    return any(name.endswith(f".{factor}") for factor in FACTORS) or f".modules_to_save.{ADAPTER}." in name


def _not_served(lora: LoraSpec) -> str:
    """Part of `lora` that A and B of linear layers, on the engine's base model, lack, with its config key; empty if
    there is none."""
    if lora.extra_modules:
        return f"{', '.join(lora.extra_modules)} (additional_target)"
    if lora.parameters:
        return f"{', '.join(lora.parameters)} (target_parameters)"
    return next((key for key in ("use_dora", "load_in_4bit") if getattr(lora, key)), "")


def _merged_experts(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """W + scale · B A of every expert; `transposed` if W is [E, I, O]. peft interleaves the experts in B."""
    experts = weight.shape[0]
    a_ERI, b_ORE = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
    merged = torch.empty_like(weight)
    for expert in range(experts):
        delta_OI = (b_ORE[:, :, expert] @ a_ERI[expert]).mul_(scale)
        merged[expert] = (delta_OI.T if transposed else delta_OI).add(weight[expert].float())
    return merged


# -- which modules -----------------------------------------------------------------------------------------------------


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Layers that can have an adapter, by path."""
    parents = dict(model.named_modules())
    known: dict[type[nn.Module], bool] = {}
    return {
        path: layer
        for path, layer in parents.items()
        if _is_linear(layer, known) and not _passed_to_kernel(parents[path.rpartition(".")[0]], path)
    }


def _is_linear(layer: nn.Module, known: dict[type[nn.Module], bool]) -> bool:
    """True if the layer computes x Wᵀ + b, which a subclass of `nn.Linear` may not do (routers).

    `known` caches the results of subclasses.
    """
    from transformers.pytorch_utils import Conv1D

    kind = type(layer)
    if not isinstance(layer, nn.Linear) or kind.forward is nn.Linear.forward:
        return isinstance(layer, (nn.Linear, Conv1D))
    if kind not in known:
        with torch.random.fork_rng(devices=[]):
            weights = {name: torch.randn(parameter.shape) for name, parameter in layer.named_parameters()}
            inputs = torch.randn(1, layer.in_features)
        try:
            outputs = functional_call(layer, weights, (inputs,))
            torch.testing.assert_close(outputs, nn.functional.linear(inputs, weights["weight"], weights.get("bias")))
            known[kind] = True
        except Exception:  # foreign code, called unlike its model calls it, may fail in any way
            known[kind] = False
    return known[kind]


def _passed_to_kernel(parent: nn.Module, path: str) -> bool:
    """True if a state-space mixer passes the layer's weight to its kernels, which would ignore an adapter."""
    return path.rpartition(".")[2] in KERNEL_LAYERS and hasattr(parent, "A_log") and hasattr(parent, "D")


def _extra_modules(model: PreTrainedModel, spec: ModelSpec) -> list[str]:
    """Paths of the modules that are trained in full."""
    modules = {
        path: module for path, module in model.named_modules() if path and next(module.parameters(), None) is not None
    }
    names = spec.lora.extra_modules if spec.lora is not None else ()
    paths = [path for name in names for path in _named(name, modules, model, "additional_target")]
    if spec.task in ("value", "reward"):
        head = scalar_head(model)
        paths.append(next(path for path, module in modules.items() if module is head))
    return list(dict.fromkeys(paths))


def target_layers(
    model: PreTrainedModel, lora: LoraSpec, extra: Sequence[str] = (), *, library: ModelLibrary | None = None
) -> list[str]:
    """Paths of the layers that get an adapter, in a model without adapters.

    `extra` are the paths of modules that are trained in full. `all-linear` selects every linear layer except the output
    layer and indexers of sparse attention, which have no gradient; or those in the blocks of a model of a `library`.
    Layers of an image encoder or projector are selected only by targets that name it: `visual.blocks.0.attn.qkv`.
    Raises `ModelError`, naming the nearest modules, for targets that the model does not have.
    """
    layers = _linear_layers(model)
    if lora.targets != ("all-linear",):
        layers |= {path: module for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if library is None:
        parts = [*text_parts(model), *_named_image_parts(model, lora.targets)]
        trained = {id(module) for part in parts for module in part.modules()}
        layers = {path: layer for path, layer in layers.items() if id(layer) in trained}
    if lora.targets == ("all-linear",):
        if library is not None:
            inside = {id(module) for block in library.blocks(model) for module in block.modules()}
        else:
            head = model.get_output_embeddings()
            inside = {
                id(layer) for path, layer in layers.items() if layer is not head and "indexer" not in path.split(".")
            }
        return [path for path, layer in layers.items() if id(layer) in inside and not _within(path, extra)]
    if isinstance(lora.targets, str):
        paths = [path for path in layers if re.fullmatch(lora.targets, path)]
        if not paths:
            raise ModelError(
                f"lora_target: the regular expression {lora.targets!r} matches the whole path of no linear layer or"
                f" embedding of {type(model).__name__}; their paths are like {next(iter(layers), 'none')}"
            )
    else:
        paths = list(
            dict.fromkeys(path for name in lora.targets for path in _named(name, layers, model, "lora_target"))
        )
    both = [path for path in paths if _within(path, extra)]
    if both:
        raise ModelError(
            f"lora_target and additional_target both select {both[0]}: a layer has an adapter or is trained in full"
        )
    return paths


def _named_image_parts(model: PreTrainedModel, targets: str | Sequence[str]) -> list[nn.Module]:
    """Image encoder and projector if `targets` contain their names."""
    texts = [targets] if isinstance(targets, str) else targets
    names = {id(module): path.rpartition(".")[2] for path, module in model.named_modules()}
    parts = chain(*image_parts(model).values())
    return [part for part in parts if any(names[id(part)] in text for text in texts)]


def _named(name: str, modules: dict[str, nn.Module], model: PreTrainedModel, key: str) -> list[str]:
    """Paths that equal `name` or end in it. Raises `ModelError` if there is none."""
    paths = [path for path in modules if path == name or path.endswith(f".{name}")]
    if paths:
        return paths
    others = [module for path, module in model.named_modules() if path == name or path.endswith(f".{name}")]
    if others:
        kind = type(others[0])
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        reason = "only linear layers and embeddings can have an adapter"
        if kind is nn.Linear:
            reason = "its module passes the weight to a kernel, which would ignore an adapter"
        raise ModelError(
            f"{key}: {name} of {type(model).__name__} is {article} {kind.__name__}, and {reason}; {_known(modules)}"
        )
    lasts = {path.rpartition(".")[2] for path in modules} | set(modules)
    close = difflib.get_close_matches(name, sorted(lasts), n=1)
    hint = f"did you mean {close[0]!r}?" if close else _known(modules)
    raise ModelError(f"{key}: {type(model).__name__} has no module {name!r}; {hint}")


def _target_parameters(model: PreTrainedModel, lora: LoraSpec) -> list[str]:
    """Names of the parameters that `lora.parameters` selects. Raises `ModelError`, naming the nearest ones."""
    known = {
        name: parameter
        for path, module in model.named_modules()
        if path and not isinstance(module, (nn.Linear, nn.Embedding))
        for name, parameter in (
            (f"{path}.{name}", parameter) for name, parameter in module.named_parameters(recurse=False)
        )
        if parameter.ndim == 3
    }
    targets: list[str] = []
    for target in lora.parameters:
        names = [name for name in known if name == target or name.endswith(f".{target}")]
        if not names:
            hint = _known(known) if known else "it has none"
            raise ModelError(
                f"target_parameters: {type(model).__name__} has no parameter {target!r} with a matrix for each expert;"
                f" {hint}"
            )
        targets += names
    return list(dict.fromkeys(targets))


def _check_patterns(lora: LoraSpec, paths: Sequence[str]) -> None:
    """Raise `ModelError` for a pattern that matches no target: peft would ignore it."""
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(lora, key)
        matched = {pattern_key(patterns, path) for path in paths}
        for pattern in patterns:
            if pattern not in matched:
                raise ModelError(
                    f"{key}: {pattern!r} matches no target, or an earlier key matches all of its targets;"
                    f" {_known(paths)}"
                )


def _known(modules: Iterable[str]) -> str:
    names = sorted({path.rpartition(".")[2] for path in modules})
    return f"it has {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path == path_of_other or path.startswith(f"{path_of_other}.") for path_of_other in others)


def _refuse_tied(model: PreTrainedModel, paths: Iterable[str]) -> None:
    """Raise `ModelError` for tied weights, which an adapter or a copy would untie."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for path in paths:
        if any(owners[id(parameter)] > 1 for parameter in model.get_submodule(path).parameters()):
            raise ModelError(
                f"{path} shares its weight with another module of {type(model).__name__} (tie_word_embeddings):"
                " changing one would untie them; leave it out of lora_target and additional_target"
            )


def _short(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Last components of the paths if they select the same modules, as other tools expect; else the full paths."""
    lasts = sorted({path.rpartition(".")[2] for path in targets})
    selected = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in lasts]
    return lasts if set(selected) == set(targets) else list(targets)


def _task_type(model: PreTrainedModel, spec: ModelSpec) -> str | None:
    """Name of the task in peft; None if peft has none."""
    if spec.library:
        return None
    if spec.task == "causal_lm":
        return "CAUSAL_LM"
    return "SEQ_CLS" if hasattr(model, "score") else None
