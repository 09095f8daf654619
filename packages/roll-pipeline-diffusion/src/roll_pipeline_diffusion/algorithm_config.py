"""Keys of samplers, windows, advantages and objectives, with their options. Light: imports no torch.

sampler ─┐
window  ─┤  each key names a built-in function or one of the user (`my_module:function`),
advantage┤  `<key>_options` has its options
objective┘
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import override

from roll_core.errors import ContractError
from roll_core.field_docs import document_fields
from roll_core.spec.algorithms import signature_schema
from roll_core.spec.config import (
    Config,
    Fraction,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    invalid,
)
from roll_pipeline_diffusion.schedules import DynamicShift, SigmaSchedule
from roll_pipeline_diffusion.windows import checked_window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PACKAGE = "roll_pipeline_diffusion"
StepRange = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
LogprobReduction = Literal["mean", "sum"]
TimeDistribution = Literal["uniform", "logit_normal"]
Variant = Literal["clip", "guard", "dppo"]


class SamplerOptions(Config):
    """Options of `ode`, which has none, and base of the other samplers' options."""

    stochastic: ClassVar[bool] = False
    """True if a step has a std above 0, so that it has a logprob."""


class SDEOptions(SamplerOptions):
    """Options of `sde` and `cps`."""

    stochastic: ClassVar[bool] = True

    noise_level: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    """Amount of noise of a step, the papers' a. The default is Flow-GRPO's."""


class CPSOptions(SDEOptions):
    """Options of `cps`."""

    noise_level: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Amount of noise of a step, the paper's η: its std is `sigma_next · sin(noise_level · π / 2)`."""


class DanceOptions(SamplerOptions):
    """Options of `dance`."""

    stochastic: ClassVar[bool] = True

    noise_level: PositiveFloat = 0.3
    """Std of the noise per unit of sigma, the paper's η."""


class WindowOptions(Config):
    """Options of `all`, which has none, and base of the other windows' options."""

    def problem(self, num_steps: int) -> tuple[str, str] | None:
        """Key and description of a value that does not fit a schedule of `num_steps` steps."""
        return None


class RandomWindowOptions(WindowOptions):
    """Options of `random`."""

    size: PositiveInt = 2
    """Number of adjacent steps."""
    step_range: StepRange | None = None
    """First step of the range and the one after its end, counted from 0. Default: all steps but the last."""

    @override
    def problem(self, num_steps: int) -> tuple[str, str] | None:
        low, high = self.step_range or (0, num_steps - 1)
        if high > num_steps - 1:
            return "step_range", (
                f"found the end {high} with num_inference_steps {num_steps}, expected at most {num_steps - 1}: step"
                f" {num_steps - 1} ends at sigma 0 and cannot be trained"
            )
        if self.size > high - low:
            return "size", f"found {self.size}, expected at most {max(high - low, 0)}, the number of steps in the range"
        return None


class ProgressiveWindowOptions(RandomWindowOptions):
    """Options of `progressive`."""

    size: PositiveInt = 4
    """Number of adjacent steps. The default is MixGRPO's."""
    stride: PositiveInt = 1
    """Steps by which the window moves."""
    iters_per_group: PositiveInt = 25
    """Updates between two moves."""


class GroupAdvantageOptions(Config):
    """Options of `group`."""

    std: Literal["global", "group", "none"] = "global"
    """Divide by the standard deviation over the batch, over the prompt's samples, or not. Flow-GRPO divides by the
    global one: a prompt whose samples hardly differ then gets small advantages."""
    normalise: Literal["sum", "separate"] = "sum"
    """With several rewards: normalise the weighted sum, or each reward before it is weighted (GDPO-like), so that a
    reward with a wide scale does not dominate."""
    epsilon: NonNegativeFloat = 1e-4
    """Added to the standard deviation. A deviation of at most this value does not divide."""
    adv_clip_max: PositiveFloat | None = 5.0
    """Bound on the absolute value of an advantage. null: none."""


class ObjectiveOptions(Config):
    """Base of the objectives' options."""

    needs_reference: ClassVar[bool] = False

    def uses_reference(self) -> bool:
        """True if the objective calls the model without its adapters."""
        return self.needs_reference


class TimeOptions(ObjectiveOptions):
    """Options of objectives that train at random sigmas."""

    time_distribution: TimeDistribution = "uniform"
    """Distribution of sigma: uniform in (0, 1), or `sigmoid(N(logit_mean, logit_std²))` (arXiv:2403.03206 §3.1)."""
    logit_mean: float = 0.0
    logit_std: PositiveFloat = 1.0

    def times(self) -> Mapping[str, Any]:
        """Arguments of `roll_pipeline_diffusion.programs.random_sigmas`."""
        return {"distribution": self.time_distribution, "mean": self.logit_mean, "std": self.logit_std}


class FlowMatchingOptions(TimeOptions):
    """Options of `flow_matching`."""

    time_distribution: TimeDistribution = "logit_normal"
    """Distribution of sigma: uniform in (0, 1), or `sigmoid(N(logit_mean, logit_std²))` (arXiv:2403.03206 §3.1)."""
    conditioning_dropout: Fraction = 0.0
    """Share of rows that train with the unconditional conditioning, for classifier-free guidance. Often 0.1."""


class ReflOptions(TimeOptions):
    """Options of `refl`. `grad_steps: K` with `stop: last` is DRaFT-K, and `lv_samples` is DRaFT-LV."""

    grad_steps: PositiveInt = 1
    """Number K of steps with gradients, up to the one at which the trajectory stops. Earlier steps have none."""
    stop: Literal["last", "uniform"] = "last"
    """Stop at the last step, or at a uniformly random step of `stop_range` (ReFL, arXiv:2304.05977)."""
    stop_range: Annotated[StepRange | None, Needs("stop", values=frozenset({"uniform"}), strict=True)] = None
    """Range [low, high) of steps, counted from 0. Default: the second half of the schedule."""
    predict: Literal["x0", "sample"] = "x0"
    """Latents that are decoded: the prediction of sigma 0 from the last step, or the next sample, which is noisy unless
    `stop` is `last` (ROLL)."""
    min_timestep_boundary: Fraction = 0.0
    """Steps with sigma below this value have no gradients, as if the model were frozen there."""
    max_timestep_boundary: Fraction = 1.0
    """Steps with sigma above this value have no gradients."""
    detach_inputs: bool = False
    """Stop gradients at the latents that the model receives (DRTune, arXiv:2405.00760). Gradients then reach each step
    through the sampler only: less memory for many steps, and no exploding products of Jacobians."""
    lv_samples: NonNegativeInt = 0
    """Further noises of the last step (DRaFT-LV, arXiv:2309.17400): the final latents are noised to the last
    step's sigma again, and predicted again. The loss is the mean over all predictions."""
    reward_scale: float = 1.0
    """The loss is `-reward_scale · (score - reward_offset)`. ROLL had 0.1 / 0.16 in its code."""
    reward_offset: float = 0.0
    """Subtracted from scores. ROLL had 0.54 in its code."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the velocity KL to the model without adapters. ROLL had 1."""
    pretrain_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of flow matching on the latents of the data, ReFL's regularisation."""

    @override
    def uses_reference(self) -> bool:
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _settings_fit_together(self) -> ReflOptions:
        if self.stop_range is not None and self.stop_range[0] >= self.stop_range[1]:
            raise ValueError(f"stop_range {self.stop_range} is empty, expected [low, high) with low < high")
        if self.min_timestep_boundary >= self.max_timestep_boundary:
            raise ValueError("expected min_timestep_boundary below max_timestep_boundary")
        if self.lv_samples and (self.stop != "last" or self.predict != "x0"):
            raise ValueError("lv_samples needs stop last and predict x0")
        return self

    def resolved_stop_range(self, num_steps: int) -> tuple[int, int] | None:
        """Range of the random stop; None for `stop: last`."""
        if self.stop == "last":
            return None
        low, high = self.stop_range or (num_steps // 2, num_steps)
        return low, high


class FlowGRPOOptions(ObjectiveOptions):
    """Options of `flow_grpo`."""

    variant: Variant = "clip"
    """Trust region. `clip`: PPO's clip of the ratio. `guard`: GRPO-Guard (arXiv:2510.22319), the ratio without its
    bias and scaled by the step's std. `dppo`: Flow-DPPO (arXiv:2606.11025), no clip, but no gradient where the ratio
    has moved away from 1 and the transition's KL is at least `kl_mask_threshold`."""
    clip: Annotated[PositiveFloat | None, Needs("variant", values=frozenset({"clip", "guard"}), strict=True)] = None
    """Clip of the ratio to 1 ± this value.

    It depends on `logprob_reduction`. With `mean` over d dimensions ratios differ from 1 by about 1e-4, and the default
    is the papers' 1e-4 (`guard`: 2e-6). With `sum` the logarithm of the ratio is d times as large, and the default is
    0.2. Watch the metric `clipfrac`.
    """
    kl_mask_threshold: PositiveFloat = 1e-5
    """Mean over dimensions of the KL from the old transition at which `dppo` masks."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the model without adapters. Flow-GRPO: 0.04, or 0.01 for PickScore."""
    kl: Literal["exact", "flow_grpo", "velocity"] = "exact"
    """`exact`: KL of the step's two Gaussians, `(mean - mean_ref)² / (2 std²)`, reduced as logprobs are. `flow_grpo`:
    mean over dimensions of the same times the step's length in sigma, as in Flow-GRPO's code. `velocity`: mean squared
    distance of the velocities."""
    log_ratio_clamp: PositiveFloat = 20.0
    """Maximum absolute logarithm of the ratio; beyond it a step has no gradient."""

    @override
    def uses_reference(self) -> bool:
        return self.kl_coef > 0


class NFTOptions(TimeOptions):
    """Options of `nft`."""

    beta: PositiveFloat = 1.0
    """Strength of guidance β: v⁺ = (1 - β) v_old + β v, v⁻ = (1 + β) v_old - β v."""
    advantage_scale: PositiveFloat = 5.0
    """Z: the optimality probability is `r = 1/2 + clip(advantage / Z, -1, 1) / 2`. The authors' code has the clamp of
    advantages, 5, here, and multiplies the loss by it."""
    kl_coef: NonNegativeFloat = 1e-4
    """Coefficient of the mean squared distance of the velocity to the model without adapters."""

    @override
    def uses_reference(self) -> bool:
        return self.kl_coef > 0


class DiffusionDPOOptions(TimeOptions):
    """Options of `diffusion_dpo`."""

    needs_reference: ClassVar[bool] = True

    beta: PositiveFloat = 2000.0
    """Inverse temperature, for errors that are means over dimensions. arXiv:2311.12908: 2000 to 5000."""


class DistillOptions(ObjectiveOptions):
    """Options of `distill`."""

    loss: Literal["kl", "velocity"] = "kl"
    """`kl`: KL of the step's two Gaussians. `velocity`: mean squared distance of the velocities; any sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A function with a name in the config."""

    target: str
    options: type[Config]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInObjective(BuiltIn):
    """An objective with a name in the config."""

    inputs: frozenset[str]
    """What the pipeline provides: `samples` (final latents), `steps` (latents of the window), `advantages`, `score` (a
    differentiable reward), `data` (latents of the data), `pairs`, `teacher` (velocities of another model)."""
    sampler: str = "ode"
    """Sampler if the config names none."""
    average: bool = False
    """True if the objective reads the moving average of the parameters."""


SAMPLERS = {
    "ode": BuiltIn(target=f"{PACKAGE}.samplers:ode", options=SamplerOptions),
    "sde": BuiltIn(target=f"{PACKAGE}.samplers:sde", options=SDEOptions),
    "dance": BuiltIn(target=f"{PACKAGE}.samplers:dance", options=DanceOptions),
    "cps": BuiltIn(target=f"{PACKAGE}.samplers:cps", options=CPSOptions),
}
WINDOWS = {
    "all": BuiltIn(target=f"{PACKAGE}.windows:all_steps", options=WindowOptions),
    "random": BuiltIn(target=f"{PACKAGE}.windows:random", options=RandomWindowOptions),
    "progressive": BuiltIn(target=f"{PACKAGE}.windows:progressive", options=ProgressiveWindowOptions),
}
ADVANTAGES = {"group": BuiltIn(target=f"{PACKAGE}.advantages:group", options=GroupAdvantageOptions)}
OBJECTIVES = {
    name: BuiltInObjective(
        target=f"{PACKAGE}.objectives:{name}",
        options=options,
        inputs=frozenset(inputs),
        sampler="sde" if "steps" in inputs else "ode",
        average=name == "nft",
    )
    for name, options, inputs in (
        ("refl", ReflOptions, ("score",)),
        ("flow_grpo", FlowGRPOOptions, ("samples", "steps", "advantages")),
        ("nft", NFTOptions, ("samples", "advantages")),
        ("diffusion_dpo", DiffusionDPOOptions, ("pairs",)),
        ("flow_matching", FlowMatchingOptions, ("data",)),
        ("distill", DistillOptions, ("steps", "teacher")),
    )
}
INPUTS = frozenset({"samples", "steps", "advantages", "score", "data", "pairs", "teacher"})
"""All inputs of objectives, see `BuiltInObjective.inputs`."""
USER_INPUTS = frozenset({"samples", "steps", "advantages"})
"""Inputs of an objective of the user without an attribute `inputs`."""
REGISTRIES: Mapping[str, Mapping[str, BuiltIn]] = {
    "sampler": SAMPLERS,
    "window": WINDOWS,
    "advantage": ADVANTAGES,
    "objective": OBJECTIVES,
}
CONTRACTS = {
    "sampler": f"{PACKAGE}.samplers:Sampler",
    "window": f"{PACKAGE}.windows:Window",
    "advantage": f"{PACKAGE}.advantages:FlowAdvantage",
    "objective": f"{PACKAGE}.objectives:FlowObjective",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundFunction:
    """A function by its name, with options. Picklable: it is imported in the process that calls it."""

    target: str
    options: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the arguments and options."""
        return load_function(self.target)(*args, **kwargs, **self.options)


@lru_cache(maxsize=64)
def load_function(target: str) -> Callable[..., Any]:
    """Import the function `module:name`, with the working directory first on the module path for a user's code.

    Raises `ContractError`.
    """
    if not target.startswith(f"{PACKAGE}."):
        sys.path[:] = dict.fromkeys((os.getcwd(), *sys.path))
    try:
        target_object = resolve_name(target)
    except Exception as error:  # code of the user
        raise ContractError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target_object):
        raise ContractError(f"{target} is not a function, found {type(target_object).__name__}")
    function: Callable[..., Any] = target_object
    return function


def options_of(key: str, name: str) -> type[Config]:
    """Schema of the options of a built-in function, or of the user's, from its parameters after the contract's.

    Raises `ContractError` if the user's function cannot be imported, or called as its contract.
    """
    if name in REGISTRIES[key]:
        return REGISTRIES[key][name].options
    step_arguments = list(inspect.signature(resolve_name(CONTRACTS[key]).__call__).parameters)[1:]
    try:
        return signature_schema(load_function(name), step_arguments)
    except TypeError as error:
        raise ContractError(f"{name} {error}") from error


OTHER = "set another objective"


class FlowAlgorithmConfig(Config):
    """Keys of the algorithm of flow models. Base of a pipeline's schema."""

    num_inference_steps: Annotated[int, Field(ge=2)] = 10
    """Steps T of a trajectory in training."""
    shift: PositiveFloat = 1.0
    """Shift of the sigma schedule. Models state theirs: SD3 3, Wan 3 to 12. With 1, sigmas are linear."""
    dynamic_shift: bool = False
    """Compute the shift from the number of image tokens, as for FLUX.1 (0.5 at 256 tokens, 1.15 at 4096)."""
    guidance_scale: NonNegativeFloat = 1.0
    """Scale g of classifier-free guidance: `v = v_uncond + g · (v_cond - v_uncond)`. With 1 there is none, and the
    model is called once per step instead of twice. Also in the training of `refl`, `flow_grpo` and `distill`."""
    logprob_reduction: Annotated[LogprobReduction, Needs("reads_logprobs", strict=True, remedy=OTHER)] = "mean"
    """Reduction over dimensions of a step's logprob and KL. `mean` as in Flow-GRPO; `sum` is the logprob itself. The
    clip depends on it: see `objective_options.clip`."""
    objective: str = "flow_grpo"
    """`refl`, `flow_grpo`, `nft`, `diffusion_dpo`, `flow_matching`, `distill`, or `my_module:function`."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the objective."""
    sampler: Annotated[str | None, Needs("reads_sampler", strict=True, remedy=OTHER)] = None
    """`ode`, `sde`, `dance`, `cps`, or `my_module:function`. Default: `sde` for objectives that train on steps,
    otherwise `ode`."""
    sampler_options: Annotated[dict[str, Any], Needs("reads_sampler", strict=True, remedy=OTHER)] = Field(
        default_factory=dict
    )
    """Options of the sampler."""
    window: Annotated[str, Needs("reads_window", strict=True, remedy=OTHER)] = "all"
    """Trained steps, which have the sampler's noise: `all`, `random`, `progressive`, or `my_module:function`. Other
    steps follow the ODE."""
    window_options: Annotated[dict[str, Any], Needs("reads_window", strict=True, remedy=OTHER)] = Field(
        default_factory=dict
    )
    """Options of the window."""
    advantage: Annotated[str, Needs("reads_advantages", strict=True, remedy=OTHER)] = "group"
    """`group`, or `my_module:function`."""
    advantage_options: Annotated[dict[str, Any], Needs("reads_advantages", strict=True, remedy=OTHER)] = Field(
        default_factory=dict
    )
    """Options of the advantage."""

    @field_validator("objective", "sampler", "window", "advantage")
    @classmethod
    def _name_is_known(cls, value: str | None, info: ValidationInfo) -> str | None:
        key = str(info.field_name)
        if value is None or value in REGISTRIES[key]:
            return value
        if ":" not in value:
            raise ValueError(f"found {value}, expected {', '.join(REGISTRIES[key])}, or my_module:function")
        try:
            options_of(key, value)
            if key == "objective":
                _inputs_of(value)
        except ContractError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("objective_options", "sampler_options", "window_options", "advantage_options")
    @classmethod
    def _options_are_those_of_the_function(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        key = str(info.field_name).removesuffix("_options")
        if key not in info.data or "objective" not in info.data:
            return value  # its name is invalid
        name = info.data[key] or _default_sampler(info.data["objective"])
        options = options_of(key, name)(**value)
        num_steps = info.data.get("num_inference_steps")
        if num_steps is None:
            return value
        if isinstance(options, WindowOptions) and (problem := options.problem(num_steps)):
            raise invalid(problem[1], value, problem[0])
        if isinstance(options, ReflOptions):
            dynamic = info.data.get("dynamic_shift", False)
            schedule = SigmaSchedule(num_steps=num_steps, shift=info.data.get("shift", 1.0))
            _check_refl(options, num_steps, None if dynamic else schedule.sigmas(()), value)
        summed = info.data.get("logprob_reduction") == "sum"
        if isinstance(options, FlowGRPOOptions) and options.variant == "guard" and summed:
            message = "found guard with logprob_reduction sum, but GRPO-Guard is defined with mean: set mean"
            raise invalid(message, value, "variant")
        return value

    @field_validator("sampler")
    @classmethod
    def _sampler_has_noise_for_logprobs(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value not in SAMPLERS or not {"objective", "objective_options"} <= info.data.keys():
            return value
        objective, objective_values = info.data["objective"], info.data["objective_options"]
        options, sampler = options_of("objective", objective)(**objective_values), SAMPLERS[value].options
        needs_noise = isinstance(options, FlowGRPOOptions) or (
            isinstance(options, DistillOptions) and options.loss == "kl"
        )
        if needs_noise and issubclass(sampler, SamplerOptions) and not sampler.stochastic:
            raise ValueError(
                f"found {value}, whose steps have no logprobs, but objective {objective} needs them: set sde"
            )
        return value

    @model_validator(mode="after")
    def _one_shift(self) -> FlowAlgorithmConfig:
        if self.dynamic_shift and self.shift != 1:
            message = f"found {self.shift:g}, but dynamic_shift computes the shift: remove one of them"
            raise invalid(message, self.shift, "shift")
        return self

    @property
    def sampler_name(self) -> str:
        """Name of the sampler, also if it is not configured."""
        return self.sampler or _default_sampler(self.objective)

    @property
    def objective_settings(self) -> Config:
        """The objective's options with defaults."""
        return options_of("objective", self.objective)(**self.objective_options)

    @property
    def window_settings(self) -> Config:
        """The window's options with defaults."""
        return options_of("window", self.window)(**self.window_options)

    @property
    def objective_inputs(self) -> frozenset[str]:
        """Inputs of the objective, see `BuiltInObjective.inputs`. An objective of the user declares them as an
        attribute of the function; default: `USER_INPUTS`."""
        if (provider := OBJECTIVES.get(self.objective)) is None:
            return _inputs_of(self.objective)
        options = self.objective_settings
        with_data = isinstance(options, ReflOptions) and options.pretrain_loss_coef > 0
        return provider.inputs | {"data"} if with_data else provider.inputs

    @property
    def reads_logprobs(self) -> bool:
        """True if the objective reads logprobs of steps. One of the user may read them from its setup."""
        return "steps" in self.objective_inputs or self.objective not in OBJECTIVES

    @property
    def reads_sampler(self) -> bool:
        """True if the objective samples, or may read the sampler from its setup."""
        return self.reads_logprobs or "score" in self.objective_inputs

    @property
    def reads_window(self) -> bool:
        """True if the objective trains on steps."""
        return "steps" in self.objective_inputs

    @property
    def reads_advantages(self) -> bool:
        """True if the objective reads advantages."""
        return "advantages" in self.objective_inputs

    @property
    def uses_reference(self) -> bool:
        """True if the objective calls the model without its adapters."""
        options = self.objective_settings
        return isinstance(options, ObjectiveOptions) and options.uses_reference()

    @property
    def uses_average(self) -> bool:
        """True if the objective reads the moving average of the parameters."""
        provider = OBJECTIVES.get(self.objective)
        return provider is not None and provider.average

    def bound(self, key: str) -> BoundFunction:
        """The function that a key (`sampler`, `window`, `advantage`, `objective`) names, with its options and their
        defaults."""
        name = self.sampler_name if key == "sampler" else getattr(self, key)
        target = REGISTRIES[key][name].target if name in REGISTRIES[key] else name
        options = options_of(key, name)(**getattr(self, f"{key}_options"))
        return BoundFunction(
            target=target, options={option: getattr(options, option) for option in type(options).model_fields}
        )

    def schedule(self, num_steps: int | None = None, *, patch_size: int = 2) -> SigmaSchedule:
        """The sigma schedule, with another number of steps for an evaluation.

        `patch_size` is the height and width of the model's tokens in latents, for `dynamic_shift`.
        """
        return SigmaSchedule(
            num_steps=num_steps or self.num_inference_steps,
            shift=self.shift,
            dynamic_shift=DynamicShift(patch_size=patch_size) if self.dynamic_shift else None,
        )

    def window_steps(self, update: int, seed: int) -> tuple[int, ...]:
        """Trained steps of an update. Raises `ContractError` for a window of the user with invalid steps."""
        function = self.bound("window")
        return checked_window(
            function(update, self.num_inference_steps, seed), self.num_inference_steps, function.target
        )


def _inputs_of(target: str) -> frozenset[str]:
    """Inputs of an objective of the user. Raises `ContractError` if the pipeline does not provide them."""
    declared = getattr(load_function(target), "inputs", USER_INPUTS)
    inputs = frozenset((declared,)) if isinstance(declared, str) else frozenset(declared)
    if unknown := sorted(inputs - INPUTS):
        raise ContractError(f"{target} has inputs {unknown[0]!r}, expected some of {', '.join(sorted(INPUTS))}")
    for name, needed in (("advantages", {"samples", "steps"}), ("teacher", {"steps"})):
        if name in inputs and not inputs & needed:
            raise ContractError(f"{target} has inputs {name!r} without {' or '.join(sorted(needed))}: add it")
    return inputs


def _default_sampler(objective: str) -> str:
    provider = OBJECTIVES.get(objective)
    return provider.sampler if provider is not None else "sde"


def _check_refl(options: ReflOptions, num_steps: int, sigmas: Sequence[float] | None, value: Any) -> None:
    """Raise `ValidationError` if `refl` has no such steps. `sigmas` are None if they depend on the latents."""
    low, high = options.resolved_stop_range(num_steps) or (num_steps - 1, num_steps)
    if high > num_steps:
        message = f"found the end {high}, expected at most {num_steps}, the number of steps (num_inference_steps)"
        raise invalid(message, value, "stop_range")
    if options.grad_steps > low + 1:
        message = f"found {options.grad_steps}, but the trajectory may stop after {low + 1} steps: lower it"
        raise invalid(message, value, "grad_steps")
    for stop in range(low, high):
        trained = sigmas[stop - options.grad_steps + 1 : stop + 1] if sigmas is not None else ()
        if trained and not any(
            options.min_timestep_boundary <= timestep <= options.max_timestep_boundary for timestep in trained
        ):
            message = (
                f"no step with gradients has a sigma between {options.min_timestep_boundary} and"
                f" {options.max_timestep_boundary}: a trajectory that stops after {stop + 1} steps has them at"
                f" {', '.join(f'{timestep:.3f}' for timestep in trained)}"
            )
            raise invalid(message, value, "min_timestep_boundary")


document_fields(__name__)
