"""Memory that `roll-core plan` predicts for each phase, beside the peaks of torch's allocator.

Runs of GRPO in this process, whose trainer and engine share a device or have one each, and two ranks of `fsdp2_train`.
Each with a deep model and long sequences, and with a wide model and short ones.
Every sequence is as long as the config allows, which is what the plan assumes.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import on_ranks
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Rows = dict[str, tuple[int, int]]
"""Predicted and measured bytes, by phase."""

SEQUENCES = 4
"""Sequences of a microbatch."""
TRAINER = {"build": "start of actor_train", "forward_backward": "train", "optimizer_step": "train: step"}
ENGINE = {"start": "start of actor_infer", "update_weights": "publish", "generate": "rollout"}
"""Phase of the plan that a strategy's method computes."""


def measured(
    device: str,
    num_devices: int,
    shape: str,
    model: Mapping[str, Any],
    length: int,
    kv_cache_gib: float,
    *,
    apart: bool,
) -> Iterator[tuple[str, Rows]]:
    """Cases, each with its predicted and measured peaks. `shape` names the model. `apart` adds GRPO on two devices."""
    with tempfile.TemporaryDirectory() as name:
        common = {"device": device, "folder": Path(name), "model": model, "length": length}
        runs = {"one device": True} | ({"two devices": False} if num_devices > 1 and apart else {})
        for where, together in runs.items():
            config = grpo(**common, kv_cache_gib=kv_cache_gib, together=together)
            yield f"GRPO on {where}, {shape}", peaks_of_run(config)
        if num_devices > 1:
            yield f"fsdp2_train, 2 ranks, {shape}", peaks_of_ranks(sft(**common))


def shared_keys(device: str, folder: Path, length: int) -> dict[str, Any]:
    """Keys of both configs. A quarter of each sequence is its prompt."""
    return {
        "output_dir": str(folder),
        "exp_name": "peaks",
        "platform": device,
        "executor": "local",
        "tokenizer": {"kind": "byte"},
        "prompt_length": length // 4,
        "response_length": length - length // 4,
        "max_steps": 2,
        "save_steps": 0,
        "eval_steps": 0,
        "export_model": False,
        "track_with": [],
    }


def grpo(
    device: str, folder: Path, model: Mapping[str, Any], length: int, *, kv_cache_gib: float, together: bool
) -> dict[str, Any]:
    """A run of two steps with two optimizer steps each, so that the policy's logprobs are a phase of their own.

    On one device in bf16 with recomputation of layers, on two in float32 without.
    """
    row = json.dumps({"prompt": "a" * (length // 4)}) + "\n"
    (folder / "rows.jsonl").write_text(2 * SEQUENCES * row, encoding="utf-8")
    dtype = "bf16" if together else "fp32"
    role = {"model_args": {"dtype": dtype, "random_init": dict(model), "disable_gradient_checkpointing": not together}}
    return shared_keys(device, folder, length) | {
        "pipeline": "rlvr",
        "rollout_batch_size": SEQUENCES,
        "num_return_sequences_in_group": 2,
        "actor_train": role
        | {
            "strategy_args": {"strategy_name": "hf_train"},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": SEQUENCES},
            "infer_batch_size": SEQUENCES,
            "device_mapping": [0],
        },
        "actor_infer": role
        | {
            "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"kv_cache_gib": kv_cache_gib}},
            "generating_args": {"min_new_tokens": length - length // 4},
            "device_mapping": [0 if together else 1],
        },
        "rewards": {"some": {"reward": "function", "function": "peaks:some_reward"}},
    }


def sft(device: str, folder: Path, model: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A run of `fsdp2_train` on two devices."""
    return shared_keys(device, folder, length) | {
        "pipeline": "sft",
        "executor": "ray",
        "num_gpus_per_node": 2,
        "sft_train": {
            "model_args": {"dtype": "bf16", "random_init": dict(model)},
            "strategy_args": {"strategy_name": "fsdp2_train"},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "training_args": {"per_device_train_batch_size": SEQUENCES, "gradient_accumulation_steps": 1},
            "infer_batch_size": SEQUENCES,
            "device_mapping": [0, 1],
        },
    }


def some_reward(prompt: str, response: str) -> float:
    """Differs between the responses to a prompt, so that there is something to learn."""
    return float(len(response.encode()) % 3)


def peaks_of_run(config: Mapping[str, Any]) -> Rows:
    """Predicted and measured peaks of a run, by device and phase."""
    from roll_core.api import run
    from roll_tools.planning import plan

    planned = plan(config).plan
    slots = {slot for role in ("actor_train", "actor_infer") for slot in config[role]["device_mapping"]}
    devices = {str(slot): planned.placement.platform.device(slot) for slot in sorted(slots)}
    watch = Watch([*devices.values()], config["rollout_batch_size"] * config["num_return_sequences_in_group"])
    gc.collect()  # an earlier run's models
    with watch.strategies():
        run(config)
    found: Rows = {}
    for load in planned.loads:
        _, _, slot = load.where.partition("slot ")
        peak = watch.peaks[devices.get(slot, ""), load.phase]
        predicted = sum(num_bytes for name, num_bytes in load.by_role if name != "device context")
        if predicted and peak:
            found[f"device {slot}, {load.phase}"] = predicted, peak
    return found


def peaks_of_ranks(config: Mapping[str, Any]) -> Rows:
    """Predicted peaks of the role `sft_train`, and those of the fuller one of two ranks, by activity."""
    from roll_core.spec.model import ModelSpec
    from roll_testing.ranks import RankHost, free_port
    from roll_tools.planning import plan

    (memory,) = plan(config).plan.memory
    keys = config["sft_train"]["model_args"]
    model = ModelSpec(random_init=keys["random_init"], dtype=keys["dtype"], gradient_checkpointing=True)
    tokens = SEQUENCES, config["prompt_length"] + config["response_length"]
    host = RankHost(preload=on_ranks.PRELOAD)
    arguments = config["platform"], memory.strategy, model, tokens, free_port()
    ranks = host.run(on_ranks.peaks, *arguments, num_ranks=2, timeout_s=180.0)
    host.close()
    return {act: (memory.num_bytes(act, "device"), max(rank[act] for rank in ranks)) for act in ranks[0]}


class Watch:
    """Peaks of devices while the embedded strategies of this process compute, by device and phase."""

    def __init__(self, devices: Sequence[str], num_scored: int) -> None:
        """`num_scored` is the number of sequences of a step."""
        self._devices, self.num_scored, self._running = devices, num_scored, Counter[str]()
        self.peaks: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one call; calls of one phase may overlap."""
        if not self._running[name]:
            for device in self._devices:
                torch.accelerator.reset_peak_memory_stats(device)
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            for device in self._devices:
                found = torch.accelerator.max_memory_allocated(device)
                self.peaks[device, name] = max(self.peaks[device, name], found)

    @contextmanager
    def strategies(self) -> Iterator[None]:
        """Measure the calls of `hf_train` and `hf_infer`."""
        from roll_infer_hf.engine import HFInferStrategy
        from roll_strategy_hf.train import HFTrainStrategy

        watch, forward_all = self, HFTrainStrategy.forward_all

        def scored(self: Any, micros: Any, *args: Any) -> Iterator[Any]:
            # Of each rollout a few responses are scored at once, beside the engine, to compare both logprobs.
            whole = sum(len(micro.lengths) for micro in micros) == watch.num_scored
            with watch.phase("logprobs of the policy" if whole else "rollout"):
                yield from forward_all(self, micros, *args)

        with ExitStack() as stack:
            stack.enter_context(patch.object(HFTrainStrategy, "forward_all", scored))
            for name, phase in TRAINER.items():
                stack.enter_context(patch.object(HFTrainStrategy, name, self._call(HFTrainStrategy, name, phase)))
            for name, phase in ENGINE.items():
                stack.enter_context(patch.object(HFInferStrategy, name, self._await(HFInferStrategy, name, phase)))
            yield

    def _call(self, owner: type, name: str, phase: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            with self.phase(phase):
                return method(*args, **named)

        return call

    def _await(self, owner: type, name: str, phase: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        async def call(*args: Any, **named: Any) -> Any:
            with self.phase(phase):
                return await method(*args, **named)

        return call
