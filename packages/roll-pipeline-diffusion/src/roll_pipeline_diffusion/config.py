"""Configuration schema of the pipeline `reward_flow`. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.errors import ModelError
from roll_core.pipelines.config import sequences_per_step
from roll_core.spec.config import (
    Config,
    DataArguments,
    Needs,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rewards,
    RunConfig,
    ScoreWorkerConfig,
    TrainWorkerConfig,
    invalid,
)
from roll_pipeline_diffusion.algorithm_config import FlowAlgorithmConfig, NFTOptions
from roll_pipeline_diffusion.models.description import describe_args
from roll_pipeline_diffusion.rewards.config import ImageRewardConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.data.rows import Rows
    from roll_core.spec.providers import Provider

FROM_SAMPLES = frozenset({"samples", "steps", "score"})
"""Inputs of an objective that come from sampled images. `refl` samples them itself."""


class FlowValidationConfig(Config):
    """`validation`: held-out prompts. Their images follow the ODE, from initial noise that is always the same."""

    data_args: DataArguments
    num_inference_steps: PositiveInt | None = None
    """Steps of a trajectory. Default: as in training. Flow-GRPO trains with 10 and evaluates with 40."""
    guidance_scale: NonNegativeFloat | None = None
    """Scale of classifier-free guidance. Default: as in training."""
    num_images_per_prompt: PositiveInt = 1
    """Images per prompt."""
    ema: bool = False
    """Sample with the moving average of the weights (`ema_decay`)."""


class RewardFlowConfig(FlowAlgorithmConfig, RunConfig):
    """`pipeline: reward_flow`: trains a flow model for images or video on rewards, preferences or data."""

    reads_text: ClassVar[bool] = False

    actor_train: TrainWorkerConfig
    """The flow model. It samples the images and is trained on them. Batch sizes count images, or pairs."""
    teacher: ScoreWorkerConfig | None = None
    """Frozen flow model whose velocities `objective: distill` learns on the student's own trajectories."""
    rewards: Rewards = Field(default_factory=dict)
    """Rewards by name. The reward of an image is their sum, each multiplied by its `weight`."""
    validation: FlowValidationConfig | None = None
    """Held-out prompts. Default: no validation."""
    rollout_batch_size: PositiveInt = 8
    """Prompts per step."""
    num_images_per_prompt: PositiveInt = 8
    """Images per prompt (G). Advantages compare them."""
    ppo_epochs: PositiveInt = 1
    """Passes over the images of a step."""
    height: PositiveInt = 512
    """Height of images in pixels."""
    width: PositiveInt = 512
    """Width of images in pixels."""
    num_frames: PositiveInt | None = None
    """Frames of a video. Default: images."""
    negative_prompt: Annotated[str, Needs("needs_unconditional", strict=True, remedy="set guidance_scale")] = ""
    """Prompt of the unconditional velocity in classifier-free guidance. Not read for rows with columns `uncond`."""
    prompt_encoder: Literal["pipeline", "words"] = "pipeline"
    """Conditioning of rows without columns `cond`. `pipeline`: the text encoders in the model's directory. `words`: a
    random vector per word, for models with random weights."""
    prompt_tokens: PositiveInt | None = None
    """Text tokens of a prompt; longer prompts are cut off. Default: as the model's pipeline in diffusers; 8 `words`."""
    embedded_guidance: NonNegativeFloat | None = None
    """Guidance scale that the model is conditioned on, for models distilled from guidance: FLUX.1-dev 3.5."""
    encoder_device: str = "cpu"
    """Device on which prompts and images of the data are encoded, once, before the first step."""
    decode_batch_size: PositiveInt = 1
    """Images that the VAE decodes at a time."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay d of a moving average of the weights, after each optimizer step: `d × average + (1 - d) × weights`.

    `objective: nft` samples with it, and moves it once per batch, after the last optimizer step. Default: none.
    """
    ema_ramp: Annotated[PositiveFloat | None, Needs("ema_decay", strict=True)] = None
    """Decay after optimizer step t: at most `ema_ramp × t`. DiffusionNFT: 0.001 up to a decay of 0.5."""
    image_column: str = "image"
    """Column with the images of `objective: flow_matching`: file names relative to the data file, or latents."""
    shuffle: bool = True
    """Shuffle the rows of each epoch. If false, rows keep the order of the files."""
    num_logged_images: Annotated[int, Field(ge=0)] = 32
    """Maximum number of images per evaluation in the report."""

    @model_validator(mode="after")
    def _data_are_given(self) -> RewardFlowConfig:
        if not self.actor_train.data_args.file_name:
            raise ValueError("actor_train.data_args.file_name is missing: name the files with the rows")
        parts = {"actor_train": self.actor_train, "validation": self.validation}
        for name, part in parts.items():
            if part is not None and part.data_args.query is not None:
                message = "the prompts of images have no query: join the columns in the data"
                raise invalid(message, part.data_args.query, name, "data_args", "query")
        return self

    @model_validator(mode="after")
    def _rewards_are_read(self) -> RewardFlowConfig:
        needed = sorted(self.objective_inputs & {"advantages", "score"})
        if needed and not self.rewards:
            raise ValueError(f"objective {self.objective} needs rewards, found none: configure at least one")
        if self.rewards and not needed and self.validation is None:
            raise ValueError(f"rewards are not read: objective {self.objective} needs none, and there is no validation")
        return self

    @model_validator(mode="after")
    def _rewards_score_images(self) -> RewardFlowConfig:
        for name, reward in self.rewards.items():
            key = ("rewards", name, "reward")
            if not isinstance(reward, ImageRewardConfig):
                message = f"{reward.reward} scores text, expected a reward of images: see `roll-core plugins`"
                raise invalid(message, reward.reward, *key)
            if "score" in self.objective_inputs and not reward.has_gradients:
                message = (
                    f"{reward.reward} has no gradients, but objective {self.objective} needs them: remove it, or use"
                    " an objective such as flow_grpo"
                )
                raise invalid(message, reward.reward, *key)
        return self

    @model_validator(mode="after")
    def _model_makes_the_images(self) -> RewardFlowConfig:
        args = self.actor_train.model_args
        try:
            model = describe_args(args, self.pretrain)
        except ModelError as error:
            raise invalid(str(error), args, "actor_train", "model_args") from error
        if model is None:
            return self
        if problem := model.size_problem(self.height, self.width, self.num_frames):
            raise invalid(problem[1], getattr(self, problem[0]), problem[0])
        if self.embedded_guidance is not None and "guidance" not in model.family.conditioning(model.config):
            message = f"found {self.embedded_guidance:g}, but {model.family.class_name} embeds no guidance: remove it"
            raise invalid(message, self.embedded_guidance, "embedded_guidance")
        if model.vae is None and model.channels != 3 and (self.samples_images or self.validation is not None):
            message = (
                f"the model has no VAE, so its latents must be pixels with 3 channels, found {model.channels}: name a"
                " pipeline's directory"
            )
            raise invalid(message, args, "actor_train", "model_args")
        return self

    @model_validator(mode="after")
    def _batches_are_whole(self) -> RewardFlowConfig:
        if not self.samples_images:
            return self
        images = self.rollout_batch_size * self.num_images_per_prompt
        per_step, product = sequences_per_step(self.actor_train)
        if images % per_step:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} prompts × num_images_per_prompt"
                f" {self.num_images_per_prompt} = {images} images, expected a multiple of the images of an optimizer"
                f" step: {product}"
            )
        compares = "advantages" in self.objective_inputs and self.advantage == "group"
        if compares and self.num_images_per_prompt == 1:
            raise ValueError(
                "num_images_per_prompt 1 leaves nothing to compare: every advantage would be 0; set at least 2"
            )
        return self

    @model_validator(mode="after")
    def _reference_and_average_exist(self) -> RewardFlowConfig:
        if self.uses_reference and not self.actor_train.model_args.trains_adapters:
            raise ValueError(
                f"objective {self.objective} compares with the model without its adapters, but actor_train trains the"
                " whole model: set actor_train.model_args.lora_target, or objective_options.kl_coef: 0 if there is one"
            )
        averages = {
            f"objective {self.objective}": self.uses_average,
            "validation.ema": self.validation is not None and self.validation.ema,
        }
        for key, needed in averages.items():
            if needed and self.ema_decay is None:
                raise ValueError(f"{key} reads the moving average of the weights: set ema_decay, for example 0.5")
        if self.ema_decay is not None and self.portable_checkpoints:
            raise ValueError(
                "portable_checkpoints contain no moving average, which a resumed run needs: remove one of"
                " portable_checkpoints and ema_decay"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_used(self) -> RewardFlowConfig:
        if (self.teacher is not None) != ("teacher" in self.objective_inputs):
            raise ValueError(
                f"objective {self.objective} reads no teacher: remove it"
                if self.teacher is not None
                else f"objective {self.objective} needs the role teacher: configure teacher"
            )
        return self

    @classmethod
    @override
    def check_rows(cls, key: str, rows: Rows, data: DataArguments, values: Mapping[Any, Any]) -> None:
        from roll_pipeline_diffusion.rows import check_rows, option_of

        objective = values.get("objective") if key == "actor_train" else None
        image_columns = [values.get("image_column", "image")]
        images = {"diffusion_dpo": [data.chosen, data.rejected], "flow_matching": image_columns}
        if option_of(values, "pretrain_loss_coef"):
            images["refl"] = image_columns
        check_rows(rows, data, images.get(str(objective), []), values)

    @override
    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        required = {"actor_train": ("module_programs",) if self.ema_decay is None else ("module_programs", "ema")}
        return required if self.teacher is None else required | {"teacher": ("module_programs",)}

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        options, messages = self.objective_settings, {}
        if isinstance(options, NFTOptions) and self.guidance_scale != 1:
            messages["guidance_scale"] = "DiffusionNFT is meant to train without guidance (arXiv:2509.16117): set 1"
        return messages

    @property
    def validation_guidance(self) -> float:
        """Guidance scale of the evaluation."""
        scale = None if self.validation is None else self.validation.guidance_scale
        return self.guidance_scale if scale is None else scale

    @property
    def needs_unconditional(self) -> bool:
        """True if programs need conditioning without the prompt."""
        dropout = getattr(self.objective_settings, "conditioning_dropout", 0.0)
        return self.guidance_scale != 1 or self.validation_guidance != 1 or dropout > 0

    @property
    def image_columns(self) -> dict[str, str]:
        """Columns with the images that the objective trains on, by the name of their latents."""
        data = self.actor_train.data_args
        if "pairs" in self.objective_inputs:
            return {"chosen_latents": data.chosen, "rejected_latents": data.rejected}
        return {"latents": self.image_column} if "data" in self.objective_inputs else {}

    @property
    def samples_images(self) -> bool:
        """True if a step samples images, False if it trains on images of the data."""
        return bool(self.objective_inputs & FROM_SAMPLES)

    @override
    def optimizer_steps(self) -> dict[str, int]:
        return {"actor_train": self.num_steps_per_batch}

    @property
    def num_steps_per_batch(self) -> int:
        """Optimizer steps per pipeline step."""
        if not self.samples_images:
            return self.ppo_epochs
        images = self.rollout_batch_size * self.num_images_per_prompt
        return self.ppo_epochs * (images // sequences_per_step(self.actor_train)[0])
