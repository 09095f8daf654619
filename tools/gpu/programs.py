"""What `./run gpu` checks: each function is one process, whose last line is JSON with its figures and aims.

    python tools/gpu/programs.py NAME --device PLATFORM [arguments]

A platform is `cpu`, or that of an accelerator: `cuda`, `rocm`, `npu`, or another package's. On a CPU, and with
ROLL_GPU_REHEARSAL set, the same code runs with tiny shapes. Exit codes: 0 passed, 1 failed, 77 not run here (the reason
is printed).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from on_ranks import PRELOAD, make_sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.platform import Platform
    from roll_infer_hf.engine import HFInferStrategy
    from roll_strategy_hf.train import HFTrainStrategy

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NOT_RUN = 77
REHEARSAL = "ROLL_GPU_REHEARSAL"
"""Environment variable; set: tiny shapes."""
QUICK_TESTS = "test_split_of or test_logprobs or test_greedy or test_its_record or test_what_was_published"
"""Tests of each kit that a rehearsal runs."""


class MissedError(Exception):
    """A check that found what it must not find."""


def qwen3(size: str) -> dict[str, Any]:
    """A config of Qwen3's architecture: `tiny`, `little` (1 M), `wide` (3 M), `small` (55 M), `0.6B` or `1.7B`."""
    hidden, intermediate, layers, heads, kv_heads, head, vocabulary = {
        "tiny": (64, 192, 2, 4, 2, 16, 512),
        "little": (128, 384, 4, 4, 2, 32, 2048),
        "wide": (256, 512, 2, 4, 4, 64, 4096),
        "small": (512, 2048, 12, 8, 8, 64, 8192),
        "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
        "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
    }[size]
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }


def model_spec(size: str, dtype: str = "bf16", **fields: Any) -> ModelSpec:
    """Random weights."""
    from roll_core.spec.model import ModelSpec

    return ModelSpec(random_init=qwen3(size), dtype=dtype, **fields)


def make_trainer(model: ModelSpec, device: str, **training: Any) -> HFTrainStrategy:
    """`hf_train`, built on the platform's first device."""
    from roll_core.spec.model import MeshInfo
    from roll_core.spec.train import TrainingSpec
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy

    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(**{"learning_rate": 1e-4, "num_steps": 100, **training}))
    strategy.build(model, MeshInfo(role="actor_train", device=torch_device(device)))
    return strategy


async def start_engine(model: ModelSpec, device: str, index: int = 0, **config: Any) -> HFInferStrategy:
    """`hf_infer`, started on a device of the platform."""
    from roll_core.spec.model import MeshInfo
    from roll_infer_hf.config import HFInferConfig
    from roll_infer_hf.engine import HFInferStrategy

    engine = HFInferStrategy(HFInferConfig(**config))
    await engine.start(model, MeshInfo(role="actor_infer", device=torch_device(device, index)))
    return engine


@cache
def find_platform(name: str) -> Platform:
    """The platform of `--device`."""
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.cluster.platform import select_platform

    return select_platform(load_registry(), name)


def torch_device(device: str, index: int = 0) -> str:
    """Torch's name of a device of the platform: `cuda:0` for `rocm`, too."""
    return find_platform(device).device(index)


def memory_is_shared(device: str) -> bool:
    """True if processes can share memory of the platform's devices."""
    from roll_weight_transports.device_memory import device_memory

    return device_memory(torch_device(device)) is not None


def has_kernels(device: str) -> bool:
    """True if the compiled decoding kernels have a variant for the platform's devices."""
    import torch

    return find_platform(device).device_type in ("cpu", "cuda") and not torch.version.hip


def is_rehearsal(device: str) -> bool:
    """True if shapes are tiny."""
    return device == "cpu" or REHEARSAL in os.environ


def on_host(device: str) -> bool:
    """True if the platform's devices have no memory beside the host's."""
    return find_platform(device).slots_share_cores


def used_bytes(device: str) -> int:
    """Bytes of the device that no other process can allocate: torch keeps freed memory reserved until it returns it."""
    import torch

    if on_host(device):
        return 0
    torch.accelerator.synchronize(torch_device(device))
    return torch.accelerator.memory_reserved(torch_device(device))


def report(figures: Mapping[str, Any], aims: Iterable[tuple[str, float, str, bool]] = (), **more: Any) -> None:
    """Print the part's JSON line. An aim is what, value, aim and whether it was met."""
    rows = [dict(zip(("what", "value", "aim", "met"), each, strict=True)) for each in aims]
    print(json.dumps({"figures": dict(figures), "aims": rows, **more}), flush=True)


def not_run(why: str) -> int:
    """Report that this machine cannot run the part."""
    report({}, why=why)
    return NOT_RUN


# -- checks ------------------------------------------------------------------------------------------------------------


def probe(device: str) -> int:
    """Platform, devices, a matrix product, and what `roll-core doctor` finds."""
    import torch

    platform = find_platform(device)
    ones = torch.ones(64, 64, device=torch_device(device))
    if float((ones @ ones).sum()) != 64.0**3:
        raise MissedError("a product of ones is wrong on this device")
    done = subprocess.run(
        [sys.executable, "-m", "roll_core", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    findings = json.loads(done.stdout)["findings"]
    wrong = [f"{each['check']}: {each['found']}" for each in findings if each["level"] in ("error", "warning")]
    report(
        {
            "platform": platform.name,
            "devices": platform.device_count(),
            "found": platform.probe().why,
            "doctor": "; ".join(wrong) or "no remarks",
        }
    )
    return 0


def kit(device: str, select: str) -> int:
    """A conformance kit, by pytest; failed tests are in the result by name."""
    if "Compiled" in select and not has_kernels(device):
        return not_run(f"the kernels have no variant for {device}")
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "report.xml"
        chosen = f"Test{select} and ({QUICK_TESTS})" if is_rehearsal(device) else f"Test{select}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={file}"]
        command += [str(HERE / "kits.py"), "-k", chosen]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "ROLL_GPU_PLATFORM": device}, check=False)
        cases = list(ElementTree.parse(file).getroot().iter("testcase")) if file.is_file() else []
    outcome = {case: [child.tag for child in case] for case in cases}
    failed = sorted({str(case.get("name")) for case, tags in outcome.items() if {"failure", "error"} & set(tags)})
    skipped = sum("skipped" in tags for tags in outcome.values())
    passed = len(cases) - len(failed) - skipped
    report({"passed": passed, "failed": len(failed), "skipped": skipped}, failed_tests=failed)
    if not passed and not failed:
        return not_run("no test of the kit ran")
    return 1 if failed else 0


def quickstart(device: str) -> int:
    """SFT and GRPO of the quick start; the accuracies of a CPU are 0.44 and 0.97."""
    examples = REPOSITORY / "examples" / "quickstart"
    subprocess.run([sys.executable, str(examples / "make_data.py")], cwd=REPOSITORY, check=True)
    rehearsal = ["max_steps=2", "eval_steps=2"] if is_rehearsal(device) else []
    scores = {}
    with tempfile.TemporaryDirectory() as output:
        pretrain = [f"pretrain={output}/quickstart-sft/latest/export"]
        for name, more in (("sft", []), ("grpo", pretrain)):
            command = [sys.executable, "-m", "roll_core", "run", str(examples / f"{name}.yaml"), f"output_dir={output}"]
            command += [f"platform={device}", "executor=local", "track_with=[]", *rehearsal, *more]
            subprocess.run(command, cwd=REPOSITORY, check=True)
            lines = (Path(output) / f"quickstart-{name}" / "latest" / "metrics.jsonl").read_text(encoding="utf-8")
            found = [json.loads(line).get("val/score/mean") for line in lines.splitlines()]
            scores[name] = [score for score in found if score is not None][-1]
    aims = [
        ("accuracy after SFT", scores["sft"], "0.35 to 0.55", 0.35 <= scores["sft"] <= 0.55),
        ("accuracy after GRPO", scores["grpo"], ">= 0.92", scores["grpo"] >= 0.92),
    ]
    report({"steps": 2} if rehearsal else {}, () if rehearsal else aims)
    return 0 if rehearsal or all(each[-1] for each in aims) else 1


async def _generate(engine: HFInferStrategy, vocabulary: int, count: int = 8, new_tokens: int = 16) -> list[Any]:
    """Completions of prompts of different lengths, each with its prompt's tokens."""
    from roll_core.types import GenerateRequest, SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    prompts = [make_sequences(1, 8 + 3 * i, vocabulary)[0].tokens for i in range(count)]
    requests = [GenerateRequest(id=str(i), prompt_ids=prompts[i], params=params) for i in range(count)]
    found = await asyncio.gather(*[engine.generate(each) for each in requests])
    return list(zip(prompts, found, strict=True))


def decode(device: str) -> int:
    """Decodes rows of different lengths in bf16; the trainer computes the logprobs of the sampled tokens again."""
    import numpy as np

    from roll_core.data.pack import pack
    from roll_core.spec.train import WantedOutputs
    from roll_core.types import TrainSequence

    model = model_spec("tiny" if is_rehearsal(device) else "small", "bf16")

    async def completions() -> list[Any]:
        engine = await start_engine(model, device, kv_cache_gib=2**-6)
        found = await _generate(engine, 500)
        await engine.stop()
        return found

    gaps = []
    trainer = make_trainer(model, device)
    for prompt, completion in asyncio.run(completions()):
        (output,) = completion.outputs
        tokens = np.concatenate([prompt, output.token_ids])
        row = TrainSequence(id="row", tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))
        (micro,) = pack([row], max_tokens=len(tokens))
        logprobs_T = trainer.forward(micro, WantedOutputs(logprobs=True)).logprobs_T.float().cpu().numpy()
        gaps.append(np.abs(logprobs_T[len(prompt) :] - output.logprobs).mean())
    gap = float(np.mean(gaps))
    report({}, [("engine - trainer, bf16", gap, "<= 0.05", gap <= 0.05)])
    return 0 if gap <= 0.05 else 1


def resume(device: str) -> int:
    """Two ranks of `hf_train` continue from a checkpoint with the bits of an uninterrupted run."""
    from on_ranks import resumed

    from roll_testing.ranks import RankHost, free_port

    if find_platform(device).device_count() < 2:
        return not_run("needs two devices")
    with tempfile.TemporaryDirectory() as folder:
        model = model_spec("tiny" if is_rehearsal(device) else "small")
        host = RankHost(preload=PRELOAD)
        found = host.run(resumed, device, model, (free_port(), free_port()), folder, num_ranks=2, timeout_s=120.0)
        host.close()
    if not all(found):
        raise MissedError("a resumed run has other weights than an uninterrupted one")
    report({"ranks": 2})
    return 0


def sleep(device: str) -> int:
    """Memory of the device that this process gets back from an engine which sleeps in another one.

    Counted by the platform, for all processes of the device.
    """
    from roll_core.errors import UnsupportedError

    def used() -> int:
        return find_platform(device).memory(0)["used"]

    try:
        used()
    except UnsupportedError as error:
        return not_run(str(error))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_sleep_when_told, args=(theirs, device), daemon=True)
    child.start()
    theirs.close()
    reserved = ours.recv()
    awake = used()
    ours.send("sleep")
    ours.recv()
    asleep = used()
    ours.close()
    child.join(30)
    share = (awake - asleep) / reserved
    aim = ("returned to a second process", share, ">= 0.95", share >= 0.95)
    report({"reserved MB": reserved / 1e6, "used awake MB": awake / 1e6, "used asleep MB": asleep / 1e6}, [aim])
    return 0 if share >= 0.95 else 1


def _sleep_when_told(pipe: Connection, device: str) -> None:
    """The engine's process: generate, send the reserved bytes, sleep, and end when the pipe is closed."""

    async def serve() -> None:
        size = "tiny" if is_rehearsal(device) else "small"
        engine = await start_engine(model_spec(size), device, kv_cache_gib=2**-6 if is_rehearsal(device) else 1.0)
        await _generate(engine, 500)
        pipe.send(used_bytes(device))
        pipe.recv()
        await engine.sleep()
        pipe.send("asleep")
        with contextlib.suppress(EOFError):
            pipe.recv()
        await engine.stop()

    asyncio.run(serve())


def transport(device: str, which: str) -> int:
    """Weights of a trainer in an engine, proven: in one process, or in two on one device."""
    if which == "collective" and find_platform(device).device_count() < 2:
        return not_run("needs two devices: collective libraries take one process for each")
    if which == "cuda_ipc" and not memory_is_shared(device):
        return not_run(f"memory of {device} cannot be shared between processes")
    seconds, num_bytes = sync_once(device, which, "tiny" if is_rehearsal(device) else "small", rounds=3)
    report({"seconds": min(seconds), "MB": num_bytes / 1e6})
    return 0


def offload(device: str) -> int:
    """Bytes that `offload` and `sleep` return, and that everything comes back bit for bit."""
    import torch

    from roll_core.algorithms.losses import sft_objective
    from roll_core.data.pack import pack

    size = "tiny" if is_rehearsal(device) else "small"
    vocabulary = qwen3(size)["vocab_size"]
    trainer = make_trainer(model_spec(size), device)
    trainer.forward_backward(pack(make_sequences(4, 128, vocabulary), max_tokens=512), sft_objective())
    trainer.optimizer_step()
    before = {name: tensor.clone().cpu() for name, tensor in trainer.export_weights()}
    loaded = used_bytes(device)
    trainer.offload(("weights", "grads", "optimizer"))
    left = used_bytes(device)
    trainer.onload(("weights", "grads", "optimizer"))
    for name, tensor in trainer.export_weights():
        if not torch.equal(tensor.cpu(), before[name]):
            raise MissedError(f"{name} changed on its way to the host and back")
    trainer.close()
    del trainer

    async def sleeping() -> tuple[int, int]:
        engine = await start_engine(model_spec(size), device, kv_cache_gib=2**-6)
        await _generate(engine, vocabulary)
        awake = used_bytes(device)
        await engine.sleep()
        asleep = used_bytes(device)
        await engine.stop()
        return awake, asleep

    awake, asleep = asyncio.run(sleeping())
    shares = {"offload returns": 1 - left / loaded, "sleep returns": 1 - asleep / awake}
    report(
        {"loaded MB": loaded / 1e6, "awake MB": awake / 1e6}, [(k, v, ">= 0.95", v >= 0.95) for k, v in shares.items()]
    )
    return 0 if min(shares.values()) >= 0.95 else 1


def numerics(device: str) -> int:
    """Logprobs in bf16 beside fp32, the engine beside the trainer, matrices in fp8 and attention beside fp32."""
    import numpy as np
    import torch

    from roll_core.data.pack import pack
    from roll_core.spec.fp8 import quantise_rows
    from roll_core.spec.train import WantedOutputs
    from roll_core.types import GenerateRequest, SamplingParams

    size = "tiny" if is_rehearsal(device) else "small"
    sequences = make_sequences(8, 64, 500)
    (micro,) = pack(sequences, max_tokens=8 * 64)
    found = {}
    for dtype in ("fp32", "bf16"):
        trainer = make_trainer(model_spec(size, dtype), device)
        found[dtype] = trainer.forward(micro, WantedOutputs(logprobs=True)).logprobs_T.float().cpu().numpy()
        trainer.close()

    async def engine_logprobs() -> Any:
        engine = await start_engine(model_spec(size, "fp32"), device, kv_cache_gib=0.25)
        requests = [
            GenerateRequest(
                id=each.id,
                prompt_ids=each.tokens,
                params=SamplingParams(max_new_tokens=1, ignore_eos=True),
                prompt_logprobs=True,
            )
            for each in sequences
        ]
        completions = await asyncio.gather(*[engine.generate(each) for each in requests])
        await engine.stop()
        return np.concatenate([each.prompt_logprobs for each in completions])

    trained = micro.loss_mask_T.numpy()
    engine = asyncio.run(engine_logprobs())
    weight = torch.randn(512, 512, device=torch_device(device))
    matrix, scale = quantise_rows(weight)
    rounded = float(((matrix.float() * scale - weight).norm() / weight.norm()).cpu())
    gaps = {
        "bf16 - fp32": float(np.abs(found["bf16"] - found["fp32"])[trained].mean()),
        "engine - trainer, fp32": float(np.abs(engine - found["fp32"])[trained].mean()),
        "fp8 matrix, relative": rounded,
    }
    bounds = {"bf16 - fp32": 0.05, "engine - trainer, fp32": 1e-3, "fp8 matrix, relative": 0.05}
    attention = attention_errors(torch_device(device))
    gaps, bounds = gaps | attention, bounds | dict.fromkeys(attention, 5e-3)
    report({}, [(what, gaps[what], f"<= {bounds[what]:g}", gaps[what] <= bounds[what]) for what in gaps])
    return 0 if all(gaps[what] <= bounds[what] for what in gaps) else 1


def attention_errors(device: str) -> dict[str, float]:
    """Relative errors of outputs and gradients of packed attention in fp16, by case, beside float32 on the host."""
    import torch

    from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat

    lengths, heads, key_heads, head_size = (70, 1, 9, 200), 8, 2, 64
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(lengths), head_size) for count in (heads, key_heads, key_heads)]
    *inputs, sinks_H = (torch.randn(shape, generator=generator).half().float() for shape in (*shapes, (heads,)))
    upstream = torch.randn(1, sum(lengths), heads, head_size, generator=generator)

    def computed(place: str, dtype: torch.dtype, window: int, sinks: bool) -> list[torch.Tensor]:
        given = [each.to(place, dtype).requires_grad_() for each in (*inputs, *([sinks_H] if sinks else []))]
        options = AttentionOptions(
            layout=FlatLayout(lengths), scale=0.125, window=window, softcap=0.0, sinks_H=given[3] if sinks else None
        )
        out = attend_flat(*given[:3], options)
        grads = torch.autograd.grad(out, given, upstream.to(place, dtype))
        return [each.detach().cpu().float() for each in (out, *grads)]

    errors = {}
    for name, window, sinks in (("", 0, False), (", window", 16, False), (", sinks", 0, True)):
        exact = computed("cpu", torch.float32, window, sinks)
        found = computed(device, torch.float16, window, sinks)
        relative = [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
        errors[f"attention in fp16{name}, relative"] = max(relative)
    return errors


def planner(device: str) -> int:
    """Memory that `roll-core plan` predicts, beside the peaks of torch's allocator, by phase; see `peaks.py`."""
    import peaks

    num_devices = find_platform(device).device_count()
    rehearses = is_rehearsal(device)
    shapes = [("little", 256), ("wide", 96)] if rehearses else [("small", 1024), ("0.6B", 512)]
    kv_cache_gib = 2**-4 if rehearses else 1.0
    figures: dict[str, Any] = {}
    aims = []
    cases = (
        peaks.measured(device, num_devices, size, qwen3(size), length, kv_cache_gib, apart=size == shapes[0][0])
        for size, length in shapes
    )
    for name, rows in chain.from_iterable(cases):
        errors = {phase: predicted / measured - 1 for phase, (predicted, measured) in rows.items()}
        worst = max(errors, key=lambda phase: abs(errors[phase]))
        figures[f"{name}, {worst}, MB"] = [round(num_bytes / 1e6, 2) for num_bytes in rows[worst]]
        aims.append((f"{name}, {worst}", errors[worst], "within 0.10", abs(errors[worst]) <= 0.10))
    report(figures, aims)
    return 0 if all(each[-1] for each in aims) else 1


def extensions(device: str) -> int:
    """Seconds to compile the decoding kernels on first use, and ahead of time."""
    from roll_kernels.decode import CUDA_EXTENSION, EXTENSION

    if not has_kernels(device):
        return not_run(f"the kernels have no variant for {device}")
    extension = EXTENSION if on_host(device) else CUDA_EXTENSION
    with tempfile.TemporaryDirectory() as name:
        os.environ["TORCH_EXTENSIONS_DIR"] = name
        begun = time.monotonic()
        extension.load()
        just_in_time = time.monotonic() - begun
        ahead = Path(name) / "ahead"
        ahead.mkdir()
        begun = time.monotonic()
        extension.build_ahead(ahead)
        report({"on first use, s": just_in_time, "ahead of time, s": time.monotonic() - begun})
    return 0


# -- weight sync between processes -------------------------------------------------------------------------------------


def sync_once(device: str, which: str, size: str, *, rounds: int) -> tuple[list[float], int]:
    """Seconds of each publish from `hf_train` to `hf_infer` with its proof, and the bytes of the weights.

    With `collective` the engine is on a second device: collective libraries take one process for each.
    """
    from roll_core.builtin import plugin as core
    from roll_core.runtime.weights.plan import SyncPlan
    from roll_core.runtime.weights.publisher import verify
    from roll_core.runtime.weights.transfer import WeightSender
    from roll_core.spec.weights import entry_bytes
    from roll_weight_transports import plugin as between_processes

    trainer = make_trainer(model_spec(size), device)
    sender = WeightSender(trainer, role="actor_train", rank=0, device=torch_device(device))
    found = (*core.roll_weight_transports(), *between_processes.roll_weight_transports())
    transports = {each.name: each for each in found}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child: Any = None
    if which == "shared":  # the tensors themselves change hands, which takes one process
        child = threading.Thread(target=_receive, args=(theirs, device, 0, size), daemon=True)
    else:
        index = int(which == "collective")
        child = context.Process(target=_receive, args=(theirs, device, index, size), daemon=True)
    child.start()
    if ours.recv() != "ready":
        raise MissedError("the engine did not start")
    seconds, num_bytes = [], 0
    for version in range(rounds):
        plan = SyncPlan(version=version, transport=transports[which], device_digests=device != "cpu", deadline_s=120.0)
        begun = time.perf_counter()
        handle = sender.prepare(plan)
        _pass(ours, which, (plan, handle))
        sent = handle.manifest if which == "shared" else sender.send(plan).manifest  # type: ignore[union-attr]
        outcome = _take(ours, which)
        if outcome.failure is not None:
            raise outcome.failure
        verify(sent, outcome.receipt)
        seconds.append(time.perf_counter() - begun)
        num_bytes = sum(entry_bytes(entry) for entry in sent.tensors)
    _pass(ours, which, None)
    child.join(30)
    sender.close()
    trainer.close()
    return seconds, num_bytes


_here: list[Any] = []
"""What two threads of one process pass by reference."""


def _pass(pipe: Connection, which: str, value: Any) -> None:
    if which == "shared":
        _here.append(value)
        pipe.send("look")
    else:
        pipe.send(value)


def _take(pipe: Connection, which: str) -> Any:
    found = pipe.recv()
    return _here.pop() if which == "shared" and found == "look" else found


def _receive(pipe: Connection, device: str, index: int, size: str) -> None:
    """The engine's end: start, then take in every publish until None comes."""

    async def serve() -> None:
        from roll_core.runtime.weights.transfer import WeightReceiver

        engine = await start_engine(model_spec(size), device, index, kv_cache_gib=0.25)
        receiver = WeightReceiver(engine, role="actor_infer", rank=0, device=torch_device(device, index))
        pipe.send("ready")
        loop = asyncio.get_running_loop()
        while True:
            found = await loop.run_in_executor(None, pipe.recv)
            shared = found == "look"
            if shared:
                found = _here.pop()
            if found is None:
                break
            outcome = await receiver.receive(*found)
            _pass(pipe, "shared" if shared else "", outcome)
        receiver.close()
        await engine.stop()

    asyncio.run(serve())


def main(programs: Sequence[Callable[..., int]]) -> int:
    """Run the function that the first argument names."""
    by_name = {each.__name__: each for each in programs}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=by_name)
    parser.add_argument("--device", metavar="PLATFORM", required=True)
    arguments, rest = parser.parse_known_args()
    options = {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)} if rest else {}
    try:
        return by_name[arguments.name](arguments.device, **options)
    except MissedError as error:
        report({}, why=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main([probe, decode, quickstart, resume, sleep, kit, transport, offload, numerics, planner, extensions]))
