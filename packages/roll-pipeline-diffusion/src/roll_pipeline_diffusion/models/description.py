"""What a flow model is, from the JSON files of its directory: family, shapes of latents, parts of its pipeline.

Imports neither torch nor diffusers, so that `roll-core check` can use it.

A model is one of these:

- a transformer's directory, with `config.json`;
- a pipeline's directory, with `model_index.json`, a `transformer` and maybe a second expert, `transformer_2`;
- keys of a transformer's config with `_class_name`, for random weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError, ModelError
from roll_core.field_docs import document_fields
from roll_core.spec.model import ModelSpec
from roll_pipeline_diffusion.models.families import Family, family_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import ModelArguments

EXPERTS = ("transformer", "transformer_2")
"""Components of a pipeline that are trained. The second is the expert for low noise of Wan 2.2."""
INDEX = "model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeDescription:
    """Sizes of a VAE."""

    class_name: str
    spatial: int
    """Pixels per latent, in height and width."""
    temporal: int = 1
    """Frames per latent. The first frame has a latent of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowDescription:
    """A flow model without its weights."""

    family: Family
    config: Mapping[str, Any]
    """Config of the transformer."""
    experts: Mapping[str, Mapping[str, Any]]
    """Keys of the configs to build, by component; more than one only in a pipeline."""
    boundary: float | None = None
    """σ from which `transformer` is used; `transformer_2` below it. None: one expert."""
    pipeline: str = ""
    """Class of the pipeline; empty for a transformer alone."""
    directory: Path | None = None
    """Directory of the model. None: random weights."""
    vae: VaeDescription | None = None
    """None: latents are pixels."""

    @property
    def channels(self) -> int:
        """Channels of latents."""
        return self.family.latent_channels(self.config)

    def size_problem(self, height: int, width: int, num_frames: int | None = None) -> tuple[str, str] | None:
        """Name and description of a size that the model cannot generate."""
        name = self.family.class_name
        if self.family.video != (num_frames is not None):
            expected = "a number of frames" if self.family.video else "no frames"
            return "num_frames", f"found {num_frames}, but {name} needs {expected}"
        multiple = (1 if self.vae is None else self.vae.spatial) * self.family.patch(self.config)
        for key, size in (("height", height), ("width", width)):
            if size <= 0 or size % multiple:
                return key, f"found {size}, but {name} needs a positive multiple of {multiple}"
        temporal = 1 if self.vae is None else self.vae.temporal
        if num_frames is not None and (num_frames < 1 or (num_frames - 1) % temporal):
            return "num_frames", f"found {num_frames}, but the VAE needs a multiple of {temporal}, plus 1"
        return None

    def latent_shape(self, height: int, width: int, num_frames: int | None = None) -> tuple[int, ...]:
        """Shape of the latents of an image or a video, without batch dimension. Raises `DataError` for sizes that the
        model cannot generate."""
        if problem := self.size_problem(height, width, num_frames):
            raise DataError(": ".join(problem))
        factor, temporal = (1, 1) if self.vae is None else (self.vae.spatial, self.vae.temporal)
        frames = () if num_frames is None else ((num_frames - 1) // temporal + 1,)
        return self.channels, *frames, height // factor, width // factor


def describe(spec: ModelSpec) -> FlowDescription:
    """Describe the model of `spec`. Raises `ModelError` for unreadable files, unknown classes and unsupported keys."""
    if spec.random_init is not None:
        if spec.path:
            raise ModelError(f"a model has one source: path {spec.path!r} and random_init exclude each other")
        return _transformer({**spec.random_init, **spec.config_overrides}, "random_init", None)
    if not spec.path:
        raise ModelError("a model needs a source: a path (model_name_or_path, pretrain) or random_init")
    directory = Path(spec.path).expanduser()
    if (directory / INDEX).is_file():
        return _pipeline(directory, spec.config_overrides)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: expected a directory with {INDEX} or config.json of diffusers; download models of the hub"
            " first, with `hf download`"
        )
    return _transformer({**_read(directory / "config.json"), **spec.config_overrides}, str(directory), directory)


def describe_args(args: ModelArguments, pretrain: str | None) -> FlowDescription | None:
    """Describe the model that a config names. None if it names none, or one that is not in a local directory: an
    earlier run may write it. Raises `ModelError`."""
    path = args.path(pretrain)
    if args.random_init is None and not (path and Path(path).expanduser().is_dir()):
        return None
    return describe(
        ModelSpec(task="flow", path=path, random_init=args.random_init, config_overrides=args.model_config_kwargs)
    )


def describe_vae(directory: Path) -> VaeDescription | None:
    """The VAE of a pipeline's directory; None if it has none. Raises `ModelError`."""
    file = directory / "vae" / "config.json"
    if not file.is_file():
        return None
    config = _read(file)
    name = str(config.get("_class_name"))
    if name in ("AutoencoderKL", "AutoencoderKLFlux2"):
        levels = len(config.get("block_out_channels", ()))
        patches = 2 if name == "AutoencoderKLFlux2" else 1  # Its latents are patchified, see `Flux2`.
        return VaeDescription(class_name=name, spatial=patches * 2 ** (levels - 1))
    if name == "AutoencoderDC":
        return VaeDescription(class_name=name, spatial=2 ** (len(config.get("encoder_block_out_channels", ())) - 1))
    if name == "AutoencoderKLWan":
        spatial, temporal = config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)
        return VaeDescription(class_name=name, spatial=spatial, temporal=temporal)
    if name == "AutoencoderKLQwenImage":
        return VaeDescription(class_name=name, spatial=2 ** len(config.get("temperal_downsample", (0, 0, 0))))
    known = "AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC, AutoencoderKLWan, AutoencoderKLQwenImage"
    raise ModelError(f"{file}: _class_name {name!r} is no known VAE, expected {known}")


def _transformer(keys: Mapping[str, Any], where: str, directory: Path | None) -> FlowDescription:
    family = family_of(keys.get("_class_name"), where)
    return FlowDescription(family=family, config=family.config(keys), experts={EXPERTS[0]: keys}, directory=directory)


def _pipeline(directory: Path, overrides: Mapping[str, Any]) -> FlowDescription:
    index = _read(directory / INDEX)
    names = [name for name in EXPERTS if isinstance(index.get(name), list) and index[name][1]]
    if not names:
        raise ModelError(f"{directory / INDEX}: no component {EXPERTS[0]!r}, expected a pipeline of a flow model")
    experts = {name: {**_read(directory / name / "config.json"), **overrides} for name in names}
    families = {family_of(keys.get("_class_name"), str(directory / name)) for name, keys in experts.items()}
    if len(families) > 1:
        raise ModelError(f"{directory / INDEX}: experts of different classes")
    boundary: float | None = None
    if len(names) == len(EXPERTS):
        value = index.get("boundary_ratio")
        if not (isinstance(value, int | float) and 0 < value < 1):
            raise ModelError(f"{directory / INDEX}: boundary_ratio {value!r}, expected a number between 0 and 1")
        boundary = float(value)
    family = families.pop()
    return FlowDescription(
        family=family,
        config=family.config(experts[names[0]]),
        experts=experts,
        boundary=boundary,
        pipeline=str(index.get("_class_name")),
        directory=directory,
        vae=describe_vae(directory),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: {type(content).__name__}, expected a JSON object")
    return content


document_fields(__name__)
