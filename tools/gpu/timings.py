"""What `./run gpu` times: each function is one process, whose last line is JSON with its figures and aims.

    python tools/gpu/timings.py NAME --device PLATFORM [--model 0.6B|1.7B]

Models have random weights in the shapes of Qwen3. In a rehearsal the shapes are tiny and no aim is judged. MFU counts
6 floating-point operations per weight of a matrix product and token, 12 per attended pair and head dimension halved by
causality, against the device's bf16 rate: NVIDIA's figure for dense products where the device is known, else the rate
of an 8192³ product measured here, which is reported either way.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from programs import (
    is_rehearsal,
    main,
    make_sequences,
    make_trainer,
    memory_is_shared,
    model_spec,
    on_host,
    qwen3,
    report,
    start_engine,
    sync_once,
    torch_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NOMINAL_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16, without sparsity, by what stands in the device's name."""
PACKED = 4096
"""Tokens of a microbatch."""


def _synchronise(device: str) -> None:
    if not on_host(device):
        import torch

        torch.accelerator.synchronize(torch_device(device))


def _seconds(device: str, call: Callable[[], object], *, times: int, warm_up: int = 1) -> float:
    """Median seconds of a call."""
    for _ in range(warm_up):
        call()
    found = []
    for _ in range(times):
        _synchronise(device)
        begun = time.perf_counter()
        call()
        _synchronise(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _peak_bytes(device: str) -> int:
    import torch

    return 0 if on_host(device) else torch.accelerator.max_memory_reserved(torch_device(device))


def _forget_peak(device: str) -> None:
    """Before another contestant: what the last one reserved is none of its memory."""
    import torch

    gc.collect()
    if not on_host(device):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(torch_device(device))


def _gemm_flops(device: str) -> float:
    """Operations per second of a square bf16 product."""
    import torch

    size = 256 if is_rehearsal(device) else 8192
    left, right = (torch.randn(size, size, device=torch_device(device), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _seconds(device, lambda: left @ right, times=10, warm_up=3)


def _step_flops(config: dict[str, Any], tokens: int, length: int) -> float:
    """Of forward and backward over sequences of one length."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * heads + 2 * hidden * kv_heads + 3 * hidden * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return tokens * (6 * weights + 12 * config["num_hidden_layers"] * heads * length / 2)


def sft_step(device: str, model: str) -> int:
    """An optimizer step over packed sequences, beside a plain loop over transformers' model on the same tokens."""
    from roll_core.algorithms.losses import sft_objective
    from roll_core.data.pack import pack

    size, packed = ("tiny", 128) if is_rehearsal(device) else (model, PACKED)
    config, micro_batches = qwen3(size), 4
    gemm = _gemm_flops(device)
    figures: dict[str, Any] = {}
    for length in (packed, packed // 8):
        sequences = make_sequences(micro_batches * packed // length, length, config["vocab_size"])
        micros = pack(sequences, max_tokens=packed)
        _forget_peak(device)
        trainer = make_trainer(model_spec(size, "bf16", gradient_checkpointing=False), device)

        def step(trainer: Any = trainer, micros: Any = micros) -> None:
            trainer.forward_backward(micros, sft_objective())
            trainer.optimizer_step()

        seconds = _seconds(device, step, times=5, warm_up=2)
        tokens = micro_batches * packed
        name = f"{length} tokens a sequence"
        figures[f"{name}, tokens/s"] = tokens / seconds
        figures[f"{name}, MFU"] = _step_flops(config, tokens, length) / seconds / _nominal(device, gemm)
        figures[f"{name}, GB"] = _peak_bytes(device) / 1e9
        trainer.close()
        del trainer, step
    plain = _plain_loop(device, size, micro_batches, packed)
    figures |= {f"plain loop, {key}": value for key, value in plain.items()}
    figures["TFLOP/s of an 8192³ product"] = gemm / 1e12
    ours = f"{packed} tokens a sequence"
    mfu, memory = figures[f"{ours}, MFU"], figures[f"{ours}, GB"]
    times_plain = figures[f"{ours}, tokens/s"] / plain["tokens/s"]
    aims = [
        ("MFU", mfu, ">= 0.45", mfu >= 0.45),
        ("times the plain loop", times_plain, ">= 1", times_plain >= 1),
        ("memory beside the plain loop", memory / max(plain["GB"], 1e-9), "<= 1", memory <= plain["GB"]),
    ]
    report(figures, () if is_rehearsal(device) else aims)
    return 0


def _nominal(device: str, measured: float) -> float:
    import torch

    properties = getattr(torch.get_device_module(torch_device(device)), "get_device_properties", None)
    name = "" if properties is None or on_host(device) else properties(torch_device(device)).name
    return next((flops for part, flops in NOMINAL_FLOPS.items() if part in name), measured)


def _plain_loop(device: str, size: str, rows: int, length: int) -> dict[str, float]:
    """transformers' model and torch's fused AdamW, bf16, one row at a time, as short scripts do it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _forget_peak(device)
    keys = qwen3(size)
    config = AutoConfig.for_model(**keys)
    place = torch_device(device)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(place)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(3, keys["vocab_size"], (rows, length), device=place)

    def step() -> None:
        for row in batch:
            (model(input_ids=row[None], labels=row[None]).loss / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _seconds(device, step, times=5, warm_up=2)
    return {"tokens/s": rows * length / seconds, "GB": _peak_bytes(device) / 1e9}


def rollout(device: str, model: str) -> int:
    """256 prompts × 512 tokens by the embedded engine, with each kind of kernels, and by transformers' `generate`."""
    import numpy as np
    import torch

    from roll_core.errors import RollError
    from roll_core.types import GenerateRequest, SamplingParams

    size, count, new_tokens = ("tiny", 8, 8) if is_rehearsal(device) else (model, 256, 512)
    keys = qwen3(size)
    prompts = np.random.default_rng(0).integers(3, keys["vocab_size"], (count, 64))

    async def ours(kernels: str) -> float:
        engine = await start_engine(
            model_spec(size),
            device,
            kernels=kernels,
            max_num_seqs=count,
            kv_cache_gib=2**-6 if is_rehearsal(device) else 24.0,
        )

        async def generate(tokens: int) -> None:
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            requests = [
                GenerateRequest(id=f"{tokens}-{i}", prompt_ids=prompt, params=params)
                for i, prompt in enumerate(prompts)
            ]
            await asyncio.gather(*[engine.generate(each) for each in requests])

        await generate(4)
        begun = time.perf_counter()
        await generate(new_tokens)
        seconds = time.perf_counter() - begun
        await engine.stop()
        return count * new_tokens / seconds

    figures: dict[str, Any] = {}
    for kernels in ("torch", "compiled"):
        try:
            figures[f"hf_infer, {kernels} kernels, tokens/s"] = asyncio.run(ours(kernels))
        except RollError as error:
            figures[f"hf_infer, {kernels} kernels"] = f"failed: {error}"
    from transformers import AutoConfig, AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.bfloat16).to(torch_device(device))
    peer.eval()
    batch = torch.from_numpy(prompts).to(torch_device(device))

    def generate() -> None:
        peer.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )

    peers = count * new_tokens / _seconds(device, generate, times=1, warm_up=0)
    figures["transformers generate, tokens/s"] = peers
    best = max(value for value in figures.values() if isinstance(value, float) and value is not peers)
    aim = ("times generate", best / peers, ">= 3", best >= 3 * peers)
    report(figures, () if is_rehearsal(device) else [aim])
    return 0


def sync(device: str, model: str) -> int:
    """A publish with its proof, by each transport that two processes on this device have."""
    size = "tiny" if is_rehearsal(device) else model
    figures: dict[str, Any] = {}
    for which in ("shared", "cuda_ipc", "shm") if memory_is_shared(device) else ("shared", "shm"):
        seconds, num_bytes = sync_once(device, which, size, rounds=4)
        figures[f"{which}, s"] = min(seconds[1:])
        figures["GB"] = num_bytes / 1e9
    ipc = figures.get("cuda_ipc, s", float("nan"))
    report(figures, [("cuda_ipc, s", ipc, "< 1", ipc < 1)] if memory_is_shared(device) else ())
    return 0


def grpo_step(device: str, model: str) -> int:
    """Steps of `roll-core run` with the rlvr pipeline: 16 prompts × 8 samples × 256 tokens, rollouts included."""
    import yaml

    size, prompts, tokens = ("tiny", 4, 8) if is_rehearsal(device) else (model, 16, 256)
    steps = 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": f"{i:03d}: " + "count on " * 6} for i in range(prompts * steps)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        role = {
            "model_args": {"dtype": "bf16", "random_init": qwen3(size), "disable_gradient_checkpointing": False},
            "device_mapping": [0],
        }
        config = {
            "pipeline": "rlvr",
            "output_dir": name,
            "exp_name": "grpo",
            "platform": device,
            "executor": "local",
            "tokenizer": {"kind": "byte"},
            "prompt_length": 128,
            "response_length": tokens,
            "max_steps": steps,
            "save_steps": 0,
            "eval_steps": 0,
            "export_model": False,
            "track_with": [],
            "rollout_batch_size": prompts,
            "num_return_sequences_in_group": 8,
            "actor_train": role
            | {
                "strategy_args": {"strategy_name": "hf_train"},
                "data_args": {"file_name": str(folder / "rows.jsonl")},
                "training_args": {
                    "learning_rate": 1e-6,
                    "per_device_train_batch_size": prompts,
                    "gradient_accumulation_steps": 8,
                },
            },
            "actor_infer": role | {"strategy_args": {"strategy_name": "hf_infer"}},
            "rewards": {"some": {"reward": "function", "function": "grpo_step:some_reward"}},
        }
        (folder / "grpo.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "roll_core", "run", str(folder / "grpo.yaml")], check=True)
        lines = (folder / "grpo" / "latest" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines][1:]
    stages = {key for key in found[-1] if key.startswith("time/")}
    report({f"{key.removeprefix('time/')}, s": statistics.median(row.get(key, 0.0) for row in found) for key in stages})
    return 0


def attention(device: str) -> int:
    """Causal attention over packed rows of 4096 tokens, forward and backward: ours beside torch's and flash-attn's."""
    import torch

    from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat

    tokens, heads, kv_heads, head = (256, 4, 2, 16) if is_rehearsal(device) else (4096, 16, 8, 128)
    place, dtype = torch_device(device), torch.bfloat16
    figures: dict[str, Any] = {}
    for count in (1, 8, 64):
        lengths = (tokens // count,) * count
        query = torch.randn(1, heads, tokens, head, device=place, dtype=dtype, requires_grad=True)
        key, value = (
            torch.randn(1, kv_heads, tokens, head, device=place, dtype=dtype, requires_grad=True) for _ in range(2)
        )
        how = AttentionOptions(layout=FlatLayout(lengths), scale=head**-0.5, window=0, softcap=0.0)

        def flat(q: Any = query, k: Any = key, v: Any = value, how: Any = how) -> None:
            attend_flat(q, k, v, how).sum().backward()

        figures[f"{count} sequences, attend_flat, ms"] = 1e3 * _seconds(device, flat, times=10, warm_up=3)
        for name, call in _varlen(query, key, value, lengths).items():
            try:
                figures[f"{count} sequences, {name}, ms"] = 1e3 * _seconds(device, call, times=10, warm_up=3)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                figures[f"{count} sequences, {name}"] = f"failed: {str(error).splitlines()[0]}"
    report(figures)
    return 0


def _varlen(query: Any, key: Any, value: Any, lengths: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Attention over ragged rows by other means, those that are installed."""
    import torch

    found: dict[str, Callable[[], object]] = {}
    if query.device.type == "cpu":
        return found
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=query.device)
    longest = max(lengths)

    def rows() -> list[Any]:
        """`[T, H, D]` views of the same leaves, so that each backward pass ends where ours does."""
        return [each[0].transpose(0, 1) for each in (query, key, value)]

    if importlib.util.find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        def by_torch() -> None:
            args = (*rows(), bounds, bounds, longest, longest)
            varlen_attn(*args, window_size=(-1, 0), enable_gqa=True).sum().backward()

        found["torch varlen_attn"] = by_torch
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        def by_flash() -> None:
            flash_attn_varlen_func(*rows(), bounds, bounds, longest, longest, causal=True).sum().backward()

        found["flash_attn_varlen_func"] = by_flash
    return found


if __name__ == "__main__":
    sys.exit(main([sft_step, rollout, sync, grpo_step, attention]))
