"""Decoding on a simulated device and on the CPU: `decoding.py` in an empty folder.

Writes `results.json`: the responses of both by kind of sampling, and the copies and waits of one token on the device.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_platform_sim.trace import Trace
from roll_testing.models import QWEN3

MODEL = ModelSpec(
    random_init={**QWEN3, "vocab_size": 97, "max_position_embeddings": 128, "eos_token_id": 1}, dtype="fp32"
)
FEW, MANY = 8, 28
KINDS = {
    "sampled": SamplingParams(temperature=0.7),
    "greedy": SamplingParams(temperature=0.0),
    "top-k, top-p": SamplingParams(top_k=20, top_p=0.9),
    "min-p": SamplingParams(min_p=0.05),
    "penalty": SamplingParams(repetition_penalty=1.3),
    "banned ends": SamplingParams(min_new_tokens=MANY, stop_token_ids=(5, 6)),
}


def requests(params: SamplingParams, num_tokens: int, name: str = "") -> list[GenerateRequest]:
    params = replace(params, max_new_tokens=num_tokens, seed=5, ignore_eos=not params.stop_token_ids)
    return [GenerateRequest(id=f"{name}{n}", prompt_ids=np.arange(3, 6 + n), params=params, n=2) for n in range(3)]


async def responses(engine: HFInferStrategy, wanted: list[GenerateRequest]) -> list[Any]:
    found = await asyncio.gather(*map(engine.generate, wanted))
    return [
        (output.token_ids.tolist(), output.logprobs.tolist(), output.finish_reason)
        for each in found
        for output in each.outputs
    ]


async def results(device: str) -> dict[str, Any]:
    engine = HFInferStrategy(HFInferConfig(kernels="torch", max_num_seqs=6, kv_cache_gib=0.01))
    await engine.start(MODEL, MeshInfo(role="actor_infer", rank=0, device=device))
    found: dict[str, Any] = {}
    for kind, params in KINDS.items():
        traffic: dict[int, Counter[str]] = {}
        for num_tokens in (FEW, FEW, MANY):  # the first one warms up
            with Trace() as trace:
                output = await responses(engine, requests(params, num_tokens))
            traffic[num_tokens] = Counter()
            for event, number in trace.events.items():
                blocks = event.kind == "wait" or "blocking" in event.what
                traffic[num_tokens][event.kind] += number
                traffic[num_tokens]["host_waits"] += number * blocks
        steps = MANY - FEW
        per_step = {name: (traffic[MANY][name] - traffic[FEW][name]) / steps for name in ("d2h", "h2d", "host_waits")}
        found[kind] = {"responses": output, "per_step": per_step}
    # Rows that end, wait, and take the rows of others.
    mixed = [
        each
        for i, params in enumerate(KINDS.values())
        for each in requests(replace(params, stop_token_ids=tuple(range(20))), 5 + 7 * i, f"{i}/")
    ]
    found["mixed"] = {"responses": await responses(engine, mixed)}
    await engine.stop()
    return found


async def main() -> None:
    device, cpu = await results("sim:1"), await results("cpu")
    Path("results.json").write_text(json.dumps({"device": device, "cpu": cpu}), encoding="utf-8")


torch.set_num_threads(1)
asyncio.run(main())
