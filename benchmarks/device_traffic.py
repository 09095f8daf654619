"""Traffic between host and device, counted on the simulated device: what a GPU would wait for.

    ./run bench device_traffic [PART ...] [--save LABEL]

Each part runs once with a few and once with more repetitions, and the difference is divided by their number, so that
loading and warming up do not count. A host wait is a call that returns when the device has finished, such as `.item()`,
`nonzero` or a blocking copy to the host: meanwhile nothing is launched. Copies to the device block if the host's memory
is not pinned. Operators are those that the device runs.

`--save LABEL` writes the figures into the result, beside those of other labels. Nothing here runs on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from common import REPOSITORY, RESULTS, write_result

NUM_RANKS = 2
os.environ.setdefault("ROLL_SIM_DEVICES", str(NUM_RANKS))  # torch reads it when it is imported
sys.path.append(str(REPOSITORY / "tools" / "gpu"))
from programs import find_platform, make_sequences, make_trainer, model_spec, start_engine  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll_core.spec.train import LossFn, MicroBatch, StateKind, TrainStrategy
    from roll_platform_sim.trace import Trace

DEVICE, SIZE = "sim", "tiny"
NUM_MICROBATCHES, NUM_SEQUENCES, LENGTH, VOCABULARY = 2, 8, 24, 512
PACKED_ROWS = 128
ROWS, SHORT, LONG = 4, 8, 24
"""Rows of the engine's batch, and numbers of their new tokens in the two runs."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of one step, token, publish, or offload with its onload, in one process."""

    host_waits: float
    h2d: float
    blocking_h2d: float
    h2d_bytes: float
    d2h: float
    d2h_bytes: float
    operators: float


def tracing() -> Trace:
    """Counts all threads of this process."""
    from roll_platform_sim.trace import Trace

    return Trace()


def counts(trace: Trace) -> Counter[str]:
    """Traffic by the fields of `Traffic`."""
    found: Counter[str] = Counter()
    for event, number in trace.events.items():
        blocks = "blocking" in event.what
        found["host_waits"] += number * (event.kind == "wait" or (event.kind == "d2h" and blocks))
        found["blocking_h2d"] += number * (event.kind == "h2d" and blocks)
        found["operators" if event.kind == "op" else event.kind] += number
        found[f"{event.kind}_bytes"] += trace.num_bytes[event]
    return found


def counted(run: Callable[[], Any]) -> Counter[str]:
    """Traffic of `run`."""
    with tracing() as trace:
        run()
    return counts(trace)


def per_unit(few: Counter[str], many: Counter[str], units: int) -> Traffic:
    """Traffic of one of the `units` that `many` has more than `few`."""
    return Traffic(**{name: (many[name] - few[name]) / units for name in Traffic.__dataclass_fields__})


# -- training ----------------------------------------------------------------------------------------------------------


def objectives() -> dict[str, LossFn]:
    """The losses of SFT, and of GRPO with a KL term and metrics."""
    from roll_core.algorithms.losses import policy_objective, sft_objective

    return {"SFT": sft_objective(), "GRPO": policy_objective(kl_coef=0.1)}


def microbatches() -> list[MicroBatch]:
    """New microbatches with every input of the objectives: the runtime packs them for each step."""
    import numpy as np

    from roll_core.data.pack import pack

    rng = np.random.default_rng(0)
    names = ("advantages", "old_logprobs", "ref_logprobs")
    sequences = [
        replace(each, **{name: rng.normal(size=LENGTH).astype(np.float32) for name in names})
        for each in make_sequences(NUM_SEQUENCES, LENGTH, VOCABULARY)
    ]
    return pack(sequences, max_sequences=NUM_SEQUENCES // NUM_MICROBATCHES)


def training_step(strategy: TrainStrategy, loss: LossFn) -> Traffic:
    """One optimizer step of `NUM_MICROBATCHES` microbatches."""

    def steps(number: int) -> None:
        for _ in range(number):
            strategy.forward_backward(microbatches(), loss)
            strategy.optimizer_step()

    steps(1)
    return per_unit(counted(partial(steps, 1)), counted(partial(steps, 3)), 2)


def train() -> dict[str, Traffic]:
    """`hf_train` on one device."""
    trainer = make_trainer(model_spec(SIZE, "bf16"), DEVICE, max_grad_norm=1.0)
    found = {f"training step, hf_train, {name}": training_step(trainer, loss) for name, loss in objectives().items()}
    trainer.close()
    return found


def packed_rows() -> dict[str, Traffic]:
    """Forward and backward pass of a microbatch of many short rows."""
    from roll_core.data.pack import pack

    trainer, loss = make_trainer(model_spec(SIZE, "bf16"), DEVICE), objectives()["SFT"]
    (micro,) = pack(make_sequences(PACKED_ROWS, LENGTH, VOCABULARY))
    run = partial(trainer.forward_backward, [micro], loss)
    run()
    found = {f"pass over {PACKED_ROWS} packed rows, hf_train": per_unit(Counter(), counted(run), 1)}
    trainer.close()
    return found


def train_fsdp2() -> dict[str, Traffic]:
    """Rank 0 of `fsdp2_train` on two devices."""
    import torch.multiprocessing

    from roll_testing.ranks import free_port

    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_fsdp2_rank, (free_port(), found), NUM_RANKS)  # type: ignore[no-untyped-call]
    return {name: Traffic(**fields) for name, fields in found.get().items()}


def _fsdp2_rank(rank: int, port: int, found: Any) -> None:
    from roll_core.spec.model import MeshInfo
    from roll_core.spec.train import TrainingSpec
    from roll_strategy_fsdp2.config import FSDP2Config
    from roll_strategy_fsdp2.strategy import FSDP2Strategy

    strategy = FSDP2Strategy(FSDP2Config(), TrainingSpec(learning_rate=1e-4, num_steps=100, max_grad_norm=1.0))
    platform = find_platform(DEVICE)
    mesh = MeshInfo(
        role="actor_train",
        rank=rank,
        world_size=NUM_RANKS,
        device=platform.device(rank),
        backend=platform.collective_backend,
        master_port=port,
    )
    strategy.build(model_spec(SIZE, "bf16"), mesh)
    traffic = {
        f"training step, fsdp2_train, a rank of {NUM_RANKS}, {name}": asdict(training_step(strategy, loss))
        for name, loss in objectives().items()
    }
    if rank == 0:
        found.put(traffic)
    strategy.close()


# -- the engine, weights, memory ---------------------------------------------------------------------------------------


def decode() -> dict[str, Traffic]:
    """One token of each row of a batch of `hf_infer`, with torch's operators."""
    from roll_core.types import GenerateRequest, SamplingParams

    kinds = {
        "sampled": SamplingParams(ignore_eos=True),
        "top-p 0.9, temperature 0.7": SamplingParams(ignore_eos=True, temperature=0.7, top_p=0.9),
        "argmax": SamplingParams(ignore_eos=True, temperature=0.0),
        "repetition penalty 1.1": SamplingParams(ignore_eos=True, repetition_penalty=1.1),
    }

    async def measured() -> dict[str, Traffic]:
        engine = await start_engine(model_spec(SIZE, "bf16"), DEVICE, kv_cache_gib=0.01, kernels="torch")
        prompts = make_sequences(ROWS, LENGTH, VOCABULARY)

        async def generate(params: SamplingParams, num_tokens: int) -> Counter[str]:
            params = replace(params, max_new_tokens=num_tokens)
            requests = [GenerateRequest(id=each.id, prompt_ids=each.tokens, params=params) for each in prompts]
            with tracing() as trace:
                await asyncio.gather(*map(engine.generate, requests))
            return counts(trace)

        found = {}
        for name, params in kinds.items():
            await generate(params, SHORT)
            few, many = await generate(params, SHORT), await generate(params, LONG)
            found[f"decode step, hf_infer, {name}"] = per_unit(few, many, LONG - SHORT)
        await engine.stop()
        return found

    return asyncio.run(measured())


def publish() -> dict[str, Traffic]:
    """A publish from `hf_train` to `hf_infer` with its proof: both ends, in one process."""
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.weights.plan import SyncPlan
    from roll_core.runtime.weights.publisher import verify
    from roll_core.runtime.weights.transfer import WeightReceiver, WeightSender
    from roll_core.spec.providers import WeightTransportProvider

    registry = load_registry()

    async def publish_once(plan: SyncPlan, sender: WeightSender, receiver: WeightReceiver) -> tuple[Any, Any]:
        """What was sent, and the receipt."""
        handle: Any = sender.prepare(plan)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, plan)) if not plan.transport.in_process else None
        outcome = await receiver.receive(plan, handle)
        if outcome.failure is not None:
            raise outcome.failure
        sent: Any = handle if sending is None else await sending
        return sent.manifest, outcome.receipt

    async def measured() -> dict[str, Traffic]:
        trainer = make_trainer(model_spec(SIZE, "bf16"), DEVICE)
        engine = await start_engine(model_spec(SIZE, "bf16"), DEVICE, kv_cache_gib=0.01, kernels="torch")
        device = find_platform(DEVICE).device(0)
        found, version = {}, 0
        for name in ("shm", "shared"):
            transport = registry.find(WeightTransportProvider, name)
            sender = WeightSender(trainer, role="actor_train", rank=0, device=device)
            receiver = WeightReceiver(engine, role="actor_infer", rank=0, device=device)
            for _ in range(3):
                version += 1
                plan = SyncPlan(version=version, transport=transport, device_digests=True, deadline_s=60.0)
                with tracing() as trace:
                    sending, received = await publish_once(plan, sender, receiver)
                verify(sending, received)
            found[f"publish with its proof, {name}, both ends"] = per_unit(Counter(), counts(trace), 1)
            receiver.close()
            sender.close()
        await engine.stop()
        trainer.close()
        return found

    return asyncio.run(measured())


def offload() -> dict[str, Traffic]:
    """Offload and onload of weights, gradients and optimizer state."""
    trainer = make_trainer(model_spec(SIZE, "bf16"), DEVICE)
    parts: tuple[StateKind, ...] = ("weights", "grads", "optimizer")

    def moves() -> None:
        trainer.offload(parts)
        trainer.onload(parts)

    trainer.forward_backward(microbatches(), objectives()["SFT"])
    trainer.optimizer_step()
    moves()
    found = {"offload and onload, hf_train": per_unit(Counter(), counted(moves), 1)}
    trainer.close()
    return found


PARTS = {each.__name__: each for each in (train, packed_rows, train_fsdp2, decode, publish, offload)}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """One row a figure and label."""
    lines = [
        f"Counted on the simulated device: model of 2 layers in bf16, {NUM_MICROBATCHES} microbatches of"
        f" {NUM_SEQUENCES // NUM_MICROBATCHES} sequences per training step, {ROWS} rows of the engine.",
        "",
        "| per | | host waits | copies to device | of these blocking | bytes | copies to host | bytes | operators |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = dict.fromkeys(row for figures in results.values() for row in figures)
    for row in rows:
        for label, figures in results.items():
            if row in figures:
                numbers = " | ".join(f"{value:,.0f}" for value in figures[row].values())
                lines.append(f"| {row} | {label} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--save", metavar="LABEL")
    arguments = parser.parse_args()
    figures = {row: asdict(each) for part in arguments.parts or PARTS for row, each in PARTS[part]().items()}
    results = {arguments.save or "now": figures}
    file = RESULTS / "device_traffic.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))["results"]
        results = before | {label: before.get(label, {}) | each for label, each in results.items()}
    print(table(results))
    if arguments.save:
        write_result("device_traffic", {"results": results}, table(results))


if __name__ == "__main__":
    main()
