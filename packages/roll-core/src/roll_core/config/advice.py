"""Usual hyper-parameters of pretrained language models, with sources, and the warnings of `check` outside them.

`ADVICE` is the only table: docs/hyperparameters.md shows it, and `advice_warnings` compares configs with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.spec.model import model_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import RunConfig

MIN_HIDDEN_SIZE = 512
"""Hidden size of the smallest models that advice applies to. Smaller ones are for tests."""
SOURCES = {
    "instructgpt": "[InstructGPT](https://arxiv.org/abs/2203.02155)",
    "ppo": "[PPO](https://arxiv.org/abs/1707.06347)",
    "dpo": "[DPO](https://arxiv.org/abs/2305.18290)",
    "deepseekmath": "[DeepSeekMath](https://arxiv.org/abs/2402.03300)",
    "dapo": "[DAPO](https://arxiv.org/abs/2503.14476)",
    "zephyr": "[Zephyr](https://arxiv.org/abs/2310.16944)",
    "olmo": "[OLMo](https://huggingface.co/allenai/OLMo-7B-SFT)",
    "lora": "[LoRA Without Regret](https://thinkingmachines.ai/blog/lora/)",
    "trl": "[TRL](https://huggingface.co/docs/trl)",
    "trl-lora": "[TRL's LoRA guide](https://huggingface.co/docs/trl/main/en/lora_without_regret)",
    "verl": "[verl](https://github.com/volcengine/verl/tree/main/examples)",
    "openrlhf": "[OpenRLHF](https://github.com/OpenRLHF/OpenRLHF)",
}
"""Sources of advice, by key, as links."""
RL = ("rlvr", "agentic")


@dataclass(frozen=True, slots=True)
class UsualRange:
    """Usual values of a key under a condition."""

    pipelines: tuple[str, ...]
    key: str
    """Dotted key."""
    low: float
    high: float
    method: str
    """The condition in words, for the docs."""
    seen: str
    """Values of the sources, with the keys of `SOURCES` in braces."""
    where: Mapping[str, object] = field(default_factory=dict)
    """Values that other keys must have."""
    adapters: bool | None = None
    """Only with adapters (True), or only without (False)."""


def _rate(pipelines: tuple[str, ...], role: str, low: float, high: float, method: str, seen: str) -> UsualRange:
    """A row of the learning rate of AdamW. The method ends in `LoRA` if the role trains adapters."""
    key, where = f"{role}.training_args.learning_rate", {f"{role}.training_args.optimizer": "adamw"}
    return UsualRange(pipelines, key, low, high, method, seen, where, method.endswith("LoRA"))


# fmt: off
ADVICE = (
    _rate(("sft",), "sft_train", 1e-6, 1e-4, "SFT, all parameters", "2e-6 {olmo}; 2e-5 {trl}"),
    _rate(("sft",), "sft_train", 2e-5, 2e-3, "SFT, LoRA", "2e-4 {trl-lora}; 10 × all parameters {lora}"),
    _rate(("preference",), "actor_train", 5e-8, 5e-6, "DPO, all parameters", "5e-7 {zephyr}; 5e-7 {olmo}; 1e-6 {dpo}"),
    _rate(("preference",), "actor_train", 5e-7, 5e-5, "DPO, LoRA", "10 × all parameters {lora}"),
    _rate(RL, "actor_train", 1e-7, 1e-5, "RL, all parameters",
          "1e-6 {verl}; 1e-6 {dapo}; 1e-6 {deepseekmath}; 1e-6 {openrlhf}"),
    _rate(RL, "actor_train", 2e-6, 2e-4, "RL, LoRA", "1e-5 to 5e-5 {trl-lora}; 10 × all parameters {lora}"),
    _rate(RL, "critic", 1e-6, 1e-4, "PPO's critic, all parameters", "9e-6 {openrlhf}; 1e-5 {verl}"),
    _rate(RL, "critic", 1e-5, 1e-3, "PPO's critic, LoRA", "10 × all parameters {lora}"),
    UsualRange(("rlvr",), "rollout_batch_size", 8, 4096, "RL: prompts of a batch", "512 {dapo}; 1024 {verl}"),
    UsualRange(("rlvr",), "num_return_sequences_in_group", 4, 128, "GRPO: responses to a prompt",
               "5 {verl}; 8 {trl}; 16 {dapo}; 64 {deepseekmath}", {"adv_estimator": "grpo"}),
    UsualRange(RL, "pg_clip", 0.05, 0.4, "PPO's clip range", "0.2 {ppo}; 0.2 {verl}; 0.2 {trl}", {"pg_variant": "ppo"}),
    UsualRange(RL, "pg_clip_high", 0.1, 0.6, "upper clip range (clip-higher)", "0.28 {dapo}", {"pg_variant": "ppo"}),
    UsualRange(RL, "kl_loss_coef", 1e-4, 0.1, "KL in the loss", "0.001 {verl}; 0.04 {deepseekmath}",
               {"use_kl_loss": True}),
    UsualRange(RL, "init_kl_coef", 1e-4, 0.2, "KL in the reward", "0.01 {openrlhf}; 0.02 {instructgpt}",
               {"add_token_level_kl": True}),
    UsualRange(("preference",), "beta", 0.01, 0.5, "DPO", "0.1 {dpo}; 0.1 {trl}; 0.1 {olmo}",
               {"loss_type": ["sigmoid"]}),
    UsualRange(RL, "actor_infer.generating_args.temperature", 0.6, 1.3, "RL: temperature of rollouts",
               "1.0 {dapo}; 1.0 {verl}; 1.0 {trl}"),
    UsualRange(("rlvr",), "response_length", 128, 65536, "RL: tokens of a response",
               "512 {verl}; 1024 {deepseekmath}; 20480 {dapo}"),
)
# fmt: on
"""Advice in the order of the docs. At most one entry applies to a key of a config."""


def advice_warnings(config: RunConfig) -> dict[str, str]:
    """Warnings about values outside `ADVICE`, by dotted key. Empty unless the trained model is a pretrained one."""
    return {
        advice.key: (
            f"found {value:g}, usual for {advice.method}: {advice.low:g} to {advice.high:g}"
            f" ({sources(advice.seen, linked=False)}). If the value is intended, ignore this warning"
        )
        for advice in ADVICE
        if config.pipeline in advice.pipelines
        and (value := _number(config, advice.key)) is not None
        and not advice.low <= value <= advice.high
        and all(_at(config, key) == expected for key, expected in advice.where.items())
        and _applies(config, advice)
    }


def sources(seen: str, *, linked: bool) -> str:
    """The text of `UsualRange.seen` with the names of the sources, or links to them."""
    links = SOURCES if linked else {key: link[1:].partition("]")[0] for key, link in SOURCES.items()}
    return seen.format_map(links)


def _applies(config: RunConfig, advice: UsualRange) -> bool:
    """True if the model of the key's role, or of the policy, is pretrained, and has adapters as in `advice`."""
    roles = config.roles()
    role = roles.get(advice.key.partition(".training_args")[0]) or roles.get(config.policy_role)
    if role is None or advice.adapters not in (None, role.model_args.trains_adapters):
        return False
    model = role.model_args.model_dump()
    if model.get("random_init"):
        return False
    keys = model_keys(model, config.pretrain)
    if not keys:  # a name of the hub. A directory that does not exist yet is the export of an earlier run
        name = model.get("model_name_or_path") or config.pretrain or ""
        return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)
    text = keys.get("text_config")
    size = (text if isinstance(text, dict) else keys).get("hidden_size", 0)
    return isinstance(size, int) and size >= MIN_HIDDEN_SIZE


def _number(config: RunConfig, key: str) -> float | None:
    value = _at(config, key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _at(config: RunConfig, key: str) -> Any:
    """Value of a dotted key; None if there is none."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
