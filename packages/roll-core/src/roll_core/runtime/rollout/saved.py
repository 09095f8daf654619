"""Groups and half-drawn outputs as JSON, for checkpoints and recordings: arrays as base64 of their bytes, exactly."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput, Group, Reward, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import Prompt
    from roll_core.types import RoutedExperts

ARRAYS = {"response_ids": "<i8", "logprobs": "<f4", "loss_mask": "|b1", "versions": "<i4"}
DRAWN = {"token_ids": "<i8", "logprobs": "<f4", "versions": "<i4"}


def saved_group(group: Group) -> dict[str, Any]:
    """What the prompt does not tell."""
    return {
        "samples": [
            {
                "id": sample.id,
                "finish": sample.finish_reason,
                "reward": _saved_reward(sample.reward),
                **_saved_experts(sample.routed_experts),
                **{name: saved_array(getattr(sample, name), dtype) for name, dtype in ARRAYS.items()},
            }
            for sample in group.samples
        ]
    }


def group_from(saved: Mapping[str, Any], prompt: Prompt) -> Group:
    """The group that was saved, of this prompt."""
    return Group(
        id=prompt.id,
        samples=tuple(
            Sample(
                id=each["id"],
                group_id=prompt.id,
                prompt_ids=prompt.tokens,
                finish_reason=each["finish"],
                tag=prompt.tag,
                metadata=prompt.metadata,
                reward=_reward_from(each["reward"]),
                routed_experts=_experts_from(each),
                **{name: array_from(each[name], dtype) for name, dtype in ARRAYS.items()},
            )
            for each in saved["samples"]
        ),
    )


def saved_outputs(outputs: Sequence[CompletionOutput | None]) -> list[dict[str, Any] | None]:
    """Outputs, some of them half-drawn or not begun."""
    return [
        None
        if output is None
        else {
            "finish": output.finish_reason,
            "stop": output.stop,
            **_saved_experts(output.routed_experts),
            **{name: saved_array(getattr(output, name), dtype) for name, dtype in DRAWN.items()},
        }
        for output in outputs
    ]


def outputs_from(saved: Sequence[Mapping[str, Any] | None]) -> list[CompletionOutput | None]:
    """The outputs that were saved."""
    return [
        None
        if each is None
        else CompletionOutput(
            finish_reason=each["finish"],
            stop=each["stop"],
            routed_experts=_experts_from(each),
            **{name: array_from(each[name], dtype) for name, dtype in DRAWN.items()},
        )
        for each in saved
    ]


def _saved_reward(reward: Reward | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {"value": reward.value, "failure": reward.failure, "detail": dict(reward.detail)}


def _reward_from(saved: Mapping[str, Any] | None) -> Reward | None:
    return None if saved is None else Reward(**saved)


def _saved_experts(experts: RoutedExperts | None) -> dict[str, Any]:
    """Only where there are any: most models have none."""
    if experts is None:
        return {}
    dtype = experts.dtype.newbyteorder("<").str
    return {"experts": {"dtype": dtype, "shape": list(experts.shape), "data": saved_array(experts, dtype)}}


def _experts_from(saved: Mapping[str, Any]) -> RoutedExperts | None:
    found = saved.get("experts")
    if found is None:
        return None
    experts: RoutedExperts = array_from(found["data"], found["dtype"]).reshape(found["shape"])
    return experts


def saved_array(array: np.ndarray[Any, Any], dtype: str) -> str:
    """Its bytes as base64, exactly."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def array_from(text: str, dtype: str) -> Any:
    """The array that was saved, writable."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
