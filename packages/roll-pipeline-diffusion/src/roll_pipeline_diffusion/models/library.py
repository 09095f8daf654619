"""`DiffusersLibrary`: loads and writes flow models of diffusers. `FlowModel` is the module that programs call."""

from __future__ import annotations

import inspect
import os
import shutil
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roll_core.errors import DataError, ModelError
from roll_core.spec.model import LayerSize, Linear, ModelSize
from roll_core.spec.module_program import ModelLibrary
from roll_pipeline_diffusion.models.description import EXPERTS, INDEX, FlowDescription, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.model import ModelSpec

LIBRARY = "roll_pipeline_diffusion.models.library:DiffusersLibrary"
"""`ModelSpec.library` of flow models."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".gguf")
WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"


class FlowModel(nn.Module):
    """A flow model: `forward(latents, sigma, **conditioning) -> velocity`.

    Parameters have the names of the diffusers transformer, below `transformer.` (and `transformer_2.`).

    With two experts (Wan 2.2), rows with σ ≥ `boundary` use `transformer`, the others `transformer_2`, as in diffusers.
    If rows of a batch need both, both run on all rows; otherwise only one runs. If ranks call the model together, this
    holds for the rows of all ranks: ranks of a sharded model must call the same modules.
    """

    together = False
    """True if the ranks of the default process group call the model together."""

    def __init__(self, description: FlowDescription, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.description = description
        for name, expert in experts.items():
            self.add_module(name, expert)
        self._names = tuple(experts)

    def forward(self, latents: Tensor, sigma: Tensor, **conditioning: Tensor) -> Tensor:
        """Velocity like `latents` `[B, C, (F,) H, W]` at `sigma` `[B]` in [0, 1].

        Raises `DataError` for missing or unknown conditioning, and for wrong shapes.
        """
        family, config = self.description.family, self.description.config
        family.check(config, conditioning, "conditioning")
        dimensions = 5 if family.video else 4
        if latents.dim() != dimensions or latents.shape[1] != family.latent_channels(config):
            raise DataError(
                f"latents have shape {list(latents.shape)}, {family.class_name} needs {dimensions} dimensions and"
                f" {family.latent_channels(config)} channels"
            )
        if sigma.shape != latents.shape[:1]:
            raise DataError(f"sigma has shape {list(sigma.shape)}, expected [{len(latents)}], one value per row")
        if len(self._names) == 1:
            return self._velocity(self._names[0], latents, sigma, conditioning)
        high = sigma >= (self.description.boundary or 0.0)
        needed = torch.stack([high.any(), (~high).any()]).to(torch.int32)
        if self.together:
            torch.distributed.all_reduce(needed, op=torch.distributed.ReduceOp.MAX)
        some_high, some_low = needed.tolist()
        if not some_low:
            return self._velocity(EXPERTS[0], latents, sigma, conditioning)
        if not some_high:
            return self._velocity(EXPERTS[1], latents, sigma, conditioning)
        first, second = (self._velocity(name, latents, sigma, conditioning) for name in EXPERTS)
        return torch.where(high.view(-1, *[1] * (latents.dim() - 1)), first, second)

    def _velocity(self, expert: str, latents: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        return self.description.family.velocity(getattr(self, expert), latents, sigma, conditioning)


class DiffusersLibrary(ModelLibrary):
    """Models that diffusers stores: a pipeline's or a transformer's directory. See `models.description`."""

    @override
    def load(self, spec: ModelSpec) -> nn.Module:
        description = describe(spec)
        experts = {name: _expert(spec, description, name, keys) for name, keys in description.experts.items()}
        return FlowModel(description, experts).eval()

    @override
    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        flow = _flow_model(module)
        description = flow.description
        experts = [getattr(flow, name) for name in description.experts]
        return [block for expert in experts for name in description.family.blocks for block in getattr(expert, name)]

    @override
    def call_together(self, module: nn.Module) -> None:
        _flow_model(module).together = True

    @override
    def size(self, spec: ModelSpec) -> ModelSize:
        """Built on the meta device. Parameters outside the blocks count as `final_norm`."""
        description = describe(spec)
        kind = _class_of(description)
        with torch.device("meta"):
            experts = {name: kind.from_config(_keys(keys)) for name, keys in description.experts.items()}
        flow = FlowModel(description, experts)
        layers = tuple(_layer_size(block) for block in self.blocks(flow))
        width = description.config["attention_head_dim"] * description.config["num_attention_heads"]
        total = sum(parameter.numel() for parameter in flow.parameters())
        return ModelSize(
            model_type=description.family.class_name,
            vocab_size=0,
            hidden_size=width,
            query_width=width,
            key_width=width,
            num_heads=description.config["num_attention_heads"],
            normed_heads=False,
            max_positions=0,
            layers=layers,
            embedding=0,
            head=0,
            final_norm=total - sum(layer.parameters for layer in layers),
        )

    @override
    def write(self, module: nn.Module, spec: ModelSpec, state: Mapping[str, Tensor], path: Path) -> None:
        """Write a directory of the same kind as the model's: of a pipeline or of a transformer.

        Weights of the pipeline's other components are hard links to the files of `spec.path`, or copies on another file
        system. Other files are copies.
        """
        flow = _flow_model(module)
        description = flow.description
        if unknown := [name for name in state if name.split(".")[0] not in description.experts]:
            raise ModelError(
                f"weights {unknown[0]!r} belong to no component, expected {', '.join(description.experts)}"
            )
        path.mkdir(parents=True, exist_ok=True)
        if description.pipeline and description.directory is not None:
            _link_components(description.directory, path, set(description.experts))
        for name in description.experts:
            weights = {
                key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")
            }
            folder = path / name if description.pipeline else path
            _write_expert(name, getattr(flow, name), weights, folder)


def _class_of(description: FlowDescription) -> Any:
    import diffusers

    kind = getattr(diffusers, description.family.class_name, None)
    if kind is None:
        raise ModelError(
            f"diffusers {diffusers.__version__} has no {description.family.class_name}: install a newer one"
        )
    return kind


def _keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != "_class_name"}


def _layer_size(block: nn.Module) -> LayerSize:
    named = {name: child for name, child in block.named_modules() if isinstance(child, nn.Linear)}
    linears = [
        Linear(path=name, outputs=linear.out_features, inputs=linear.in_features) for name, linear in named.items()
    ]
    return LayerSize(
        parameters=sum(parameter.numel() for parameter in block.parameters()),
        linears=tuple(linears),
        active_width=max(
            (linear.outputs for linear in linears if "ff" in linear.path or "mlp" in linear.path), default=0
        ),
    )


def _flow_model(module: nn.Module) -> FlowModel:
    model = next((child for child in module.modules() if isinstance(child, FlowModel)), None)
    if model is None:
        raise ModelError(f"{type(module).__name__} is no flow model of DiffusersLibrary")
    return model


def _expert(spec: ModelSpec, description: FlowDescription, name: str, keys: Mapping[str, Any]) -> nn.Module:
    kind = _class_of(description)
    where = "random_init" if description.directory is None else str(description.directory)
    init_keys = spec.random_init if spec.random_init is not None else {}
    _refuse_unknown(kind, {**init_keys, **spec.config_overrides}, where)
    dtype = DTYPES[spec.dtype]
    try:
        if description.directory is not None:
            folder = description.directory / name if description.pipeline else description.directory
            expert = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, **spec.config_overrides)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                expert = kind.from_config(_keys(keys))
    except Exception as error:  # diffusers raises many classes for bad files and bad keys
        raise ModelError(f"{where}: {description.family.class_name} cannot be built: {error}") from error
    # diffusers' own `to` warns that it keeps some modules in float32. Strategies need one dtype.
    module: nn.Module = nn.Module.to(expert, dtype)
    return module


def _refuse_unknown(kind: type, keys: Mapping[str, Any], where: str) -> None:
    known = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]  # type: ignore[misc]
    for key in keys:
        if key not in known and not key.startswith("_"):
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ModelError(f"{where}: unknown key {key!r} of {kind.__name__}; {hint}")


def _write_expert(name: str, expert: Any, weights: dict[str, Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    with torch.device("meta"):
        expected = type(expert).from_config(expert.config).state_dict()
    # Buffers are not trained: `state` may lack them.
    for key, buffer in expert.named_buffers():
        if key in expected and key not in weights:
            weights[key] = buffer.detach().cpu()
    for what, keys in (("missing", expected.keys() - weights.keys()), ("unknown", weights.keys() - expected.keys())):
        if keys:
            raise ModelError(f"{type(expert).__name__}: {what} weights: {len(keys)}, such as {name}.{min(keys)}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("diffusion_pytorch_model*"):
        old.unlink()
    expert.save_config(folder)
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}
    save_torch_state_dict(contiguous, folder, filename_pattern=WEIGHTS, max_shard_size="10GB")


def _link_components(source: Path, target: Path, written: set[str]) -> None:
    """Link or copy the files of a pipeline, except those of the components in `written`."""
    if not (source / INDEX).is_file():
        raise ModelError(f"{source}: {INDEX} of the pipeline is missing; it is needed to export the model")
    for folder, folders, files in os.walk(source):
        relative = Path(folder).relative_to(source)
        if relative == Path():
            # Checkpoints in another layout, in the directory itself, belong to the old weights.
            folders[:] = [folder for folder in folders if folder not in written and not folder.startswith(".")]
            files = [file for file in files if Path(file).suffix not in WEIGHT_SUFFIXES]
        (target / relative).mkdir(parents=True, exist_ok=True)
        for name in files:
            to = target / relative / name
            to.unlink(missing_ok=True)
            original = (Path(folder) / name).resolve()  # a file of the hub's cache is a symbolic link
            _link_or_copy(original, to)


def _link_or_copy(original: Path, to: Path) -> None:
    if original.suffix in WEIGHT_SUFFIXES:
        with suppress(OSError):  # another file system, or one without hard links
            os.link(original, to)
            return
    shutil.copyfile(original, to)
