"""How long it takes to bring 100 M parameters from a trainer to an engine, and what the proof costs.

    ./run bench sync [--rounds N] [--receivers N ...]

`shared` runs in this process, the others between Ray workers on this host, a trainer and any number of engines, with
the runtime's own sender, receiver and publisher; `disk` through a folder for temporary files. Trainer and engines are
as simple as can be: named tensors. Publishes with and without digests alternate with a memcpy of as many bytes, so that
a noisy machine is noisy for all of them. Times of the clock are compared, and the CPU time of either end (the slowest
engine's), which does not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import xxhash
from common import write_result

from roll_core.builtin.cpu import CpuPlatform
from roll_core.runtime.executors import make_executor
from roll_core.runtime.executors.base import GroupSpec, Place
from roll_core.runtime.weight_sync import WeightPublisher, WeightReceiver, WeightSender
from roll_core.spec import weights
from roll_core.types import DataRank, WeightReceipt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from roll_core.runtime.weight_sync import Offer, ReceiveOutcome, SendOutcome, SyncPlan
    from roll_core.types import WeightManifest

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 768, 2048, 11, 32_000
MEMCPY_BYTES = 400 << 20


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder of 102 M parameters with tied embeddings."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"model.layers.{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def make_tensors(dtype: str) -> dict[str, Tensor]:
    import torch

    return {name: torch.randn(shape).to(weights.torch_dtype(dtype)) for name, shape in shapes()}


class Worker:
    """What both workers have for the benchmark: a switch for the digests, and the CPU time of the last call."""

    cpu_s = 0.0

    def digest(self, on: bool) -> None:
        """Without digests the same chunks are copied in the same order, and not looked at."""
        blind = SimpleNamespace(xxh3_128_digest=lambda chunk: b"", xxh3_128_hexdigest=lambda leaves: "")
        weights.xxhash = xxhash if on else blind  # type: ignore[assignment]

    def last_cpu_s(self) -> float:
        return self.cpu_s


class Trainer(Worker):
    """A train worker and its strategy in one."""

    def __init__(self, *, place: Place, peers: Any, dtype: str) -> None:
        import torch

        torch.set_num_threads(place.num_threads)
        self.data_rank = DataRank()
        self.tensors = make_tensors(dtype)
        self.sender = WeightSender(self, role="actor_train", rank=place.rank)  # type: ignore[arg-type]

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(0.01)

    def pointers(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def prepare_send(self, plan: SyncPlan) -> Offer | None:
        return self.sender.prepare(plan)

    def send_weights(self, plan: SyncPlan) -> SendOutcome | None:
        begun = time.thread_time()
        outcome = self.sender.send(plan)
        self.cpu_s = time.thread_time() - begun
        return outcome

    def close(self) -> None:
        self.sender.close()


class Engine(Worker):
    """An infer worker and its strategy in one."""

    def __init__(self, *, place: Place, peers: Any, dtype: str) -> None:
        import torch

        torch.set_num_threads(place.num_threads)
        self.tensors = make_tensors(dtype)
        self.receiver = WeightReceiver(self, role="actor_infer", rank=place.rank)  # type: ignore[arg-type]

    async def update_weights(
        self, version: int, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, shared: bool = False
    ) -> WeightReceipt:
        if shared:
            self.tensors = dict(tensors)
            return weights.make_receipt(manifest, self.tensors.items())
        digests = {name: weights.copy_digested(self.tensors[name], tensor) for name, tensor in tensors}
        return WeightReceipt(version=version, digests=digests)

    def pointers(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    async def receive_weights(self, plan: SyncPlan, offer: Offer) -> ReceiveOutcome:
        begun = time.thread_time()
        outcome = await self.receiver.receive(plan, offer)
        self.cpu_s = time.thread_time() - begun
        return outcome

    def close(self) -> None:
        self.receiver.close()


class Memcpy:
    """Copies between two buffers whose pages are there."""

    def __init__(self) -> None:
        import numpy as np

        self.source, self.target = np.ones(MEMCPY_BYTES, np.uint8), np.ones(MEMCPY_BYTES, np.uint8)

    def bytes_per_s(self) -> float:
        import numpy as np

        begun = time.perf_counter()
        np.copyto(self.target, self.source)
        return MEMCPY_BYTES / (time.perf_counter() - begun)


async def measure(
    transport: Any, dtype: str, receivers: int, rounds: int, memcpy: Memcpy, directory: str
) -> dict[str, Any]:
    """Publishes with and without digests, in turn."""

    def spec(role: str, kind: Any, worker: str, size: int) -> GroupSpec:
        places = tuple(Place(rank=rank, world_size=size, num_threads=1) for rank in range(size))
        return GroupSpec(role=role, kind=kind, target=f"sync:{worker}", places=places, args={"dtype": dtype})

    specs = [spec("actor_train", "train", "Trainer", 1), spec("actor_infer", "generate", "Engine", receivers)]
    async with make_executor("local" if transport == "shared" else "ray", CpuPlatform(), slots_per_node=2) as executor:
        groups = await executor.start(specs)
        train, infer = groups["actor_train"], groups["actor_infer"]
        publisher = WeightPublisher(train, infer, transport, directory=directory)
        cold = await publisher.publish(0)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        cpu: dict[str, dict[bool, list[float]]] = {"send": {True: [], False: []}, "receive": {True: [], False: []}}
        copies: list[float] = []
        proof_s: list[float] = []
        for number in range(2 * rounds):
            digests = number % 2 == 0 or transport == "shared"
            if transport == "shared":
                await train.call("step")
            else:
                await train.call("digest", digests)
                await infer.call("digest", digests)
            copies.append(memcpy.bytes_per_s())
            # Publishing a version again is no claim that something changed: without digests nothing seems to.
            report = await publisher.publish(number + 1 if transport == "shared" else 0)
            seconds[digests].append(report.seconds)
            proof_s.append(report.proof_s)
            for side, group in (("send", train), ("receive", infer)):
                cpu[side][digests].append(max(await group.call("last_cpu_s")))
        (live,) = await train.call("pointers")
        same_memory = all(held == live for held in await infer.call("pointers"))
    found: dict[str, Any] = {
        "transport": transport,
        "dtype": dtype,
        "receivers": receivers,
        "parameters": sum(_count(shape) for _, shape in shapes()),
        "weight_bytes": report.weight_bytes,
        "copied_bytes": report.copied_bytes,
        "same_memory": same_memory,
        "first_s": cold.seconds,
        "median_s": statistics.median(seconds[True]),
        "best_s": min(seconds[True]),
        "memcpy_bytes_per_s": {"median": statistics.median(copies), "best": max(copies)},
    }
    if transport == "shared":
        return found | {"proof_s": statistics.median(proof_s), "best_proof_s": min(proof_s)}
    least = {side: {"with": min(both[True]), "without": min(both[False])} for side, both in cpu.items()}
    bandwidth = {
        "median": report.weight_bytes / found["median_s"],
        "best": report.weight_bytes / found["best_s"],
    }
    return found | {
        "bytes_per_s": bandwidth,
        "delivered_bytes_per_s": {which: receivers * each for which, each in bandwidth.items()},
        "of_memcpy": {which: bandwidth[which] / found["memcpy_bytes_per_s"][which] for which in bandwidth},
        "without_digests": {"median_s": statistics.median(seconds[False]), "best_s": min(seconds[False])},
        "proof_of_sync": {
            "median": 1 - statistics.median(seconds[False]) / found["median_s"],
            "best": 1 - min(seconds[False]) / found["best_s"],
            "cpu": 1 - sum(each["without"] for each in least.values()) / sum(each["with"] for each in least.values()),
        },
        "cpu_s": least,
    }


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def table(results: list[dict[str, Any]]) -> str:
    """For readers."""
    lines = [
        "Milliseconds and ratios as median, best.",
        "",
        "| transport | dtype | engines | weights | sender copies | sync | first sync | share of memcpy's bandwidth"
        " | delivered to all | proof |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        if each["transport"] == "shared":
            share = f"no copy; same memory on both sides: {'yes' if each['same_memory'] else 'NO'}"
            delivered = "–"
            proof = f"{each['proof_s'] * 1e3:.1f}, {each['best_proof_s'] * 1e3:.1f} ms"
        else:
            share = f"{each['of_memcpy']['median']:.0%}, {each['of_memcpy']['best']:.0%}"
            delivered = f"{each['delivered_bytes_per_s']['median'] / 1e9:.2f} GB/s"
            cost, cpu = each["proof_of_sync"], each["cpu_s"]
            proof = (
                f"{cost['median']:.1%}, {cost['best']:.1%} of the sync; {cost['cpu']:.1%} of its CPU time (send"
                f" {cpu['send']['without'] * 1e3:.0f} → {cpu['send']['with'] * 1e3:.0f} ms, receive"
                f" {cpu['receive']['without'] * 1e3:.0f} → {cpu['receive']['with'] * 1e3:.0f} ms)"
            )
        lines.append(
            f"| {each['transport']} | {each['dtype']} | {each['receivers']} | {each['weight_bytes'] / 1e6:.0f} MB"
            f" | {each['copied_bytes'] / 1e6:.0f} MB | {each['median_s'] * 1e3:.1f}, {each['best_s'] * 1e3:.1f} ms"
            f" | {each['first_s'] * 1e3:.0f} ms | {share} | {delivered} | {proof} |"
        )
    return "\n".join(lines)


def notes(results: list[dict[str, Any]], load: float) -> str:
    """What the targets were, by how much they are missed, and why."""
    copying = [each for each in results if each["transport"] in ("shm", "collective") and each["receivers"] == 1]
    shm = [each for each in copying if each["transport"] == "shm"]
    lines = ["", f"Load of the machine over the last minute, before the benchmark: {load:.1f}."]
    lines += [
        f"Target for `shm` {each['dtype']}, at least 50% of memcpy's bandwidth: {each['of_memcpy']['best']:.0%}"
        f" by the clock; the CPU time of the slower end, with digests, would allow"
        f" {_bandwidth_by_cpu(each) / each['memcpy_bytes_per_s']['best']:.0%}."
        for each in shm
    ]
    lines += [
        f"Target for the proof with `{each['transport']}` {each['dtype']}, under 5% of a sync:"
        f" {each['proof_of_sync']['median']:.1%} by the clock, {each['proof_of_sync']['cpu']:.1%} of its CPU time."
        for each in copying
    ]
    if any(each["receivers"] > 1 for each in results):
        lines.append(
            "Several engines share this host's cores and memory with the trainer: where their number passes that of the"
            " cores, the times say how they take turns, and not what as many hosts would do."
        )
    lines.append(
        "By the clock `shm` needs a free core for each end: on a busy machine the ends take turns on one, and the times"
        " are the sum of both instead of the larger."
    )
    lines.append(
        "A chunk is digested where it was copied to, at what a core's second-level cache delivers: XXH3 does about 65"
        " GB/s on an AVX-512 core, where memcpy from memory to memory does about 14. A pass of its own over the bytes"
        " cannot cost less; digesting inside the copy's loop would, but takes compiled code. With `shm` both ends copy"
        " as fast as memory allows, so the pass shows; with `collective` it is a few percent."
    )
    return "\n\n".join(lines)


def _bandwidth_by_cpu(each: dict[str, Any]) -> float:
    slower: float = max(side["with"] for side in each["cpu_s"].values())
    bandwidth: float = each["weight_bytes"] / slower
    return bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1], help="numbers of engines")
    parser.add_argument("--only", choices=["shared", "shm", "collective", "disk"])
    # Ray gives its workers a lower priority than the process that measures memcpy; on a busy machine they would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    arguments = parser.parse_args()
    only = arguments.only
    memcpy, load = Memcpy(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        results = [
            asyncio.run(measure(transport, dtype, receivers, arguments.rounds, memcpy, directory))
            for transport in ("shared", "shm", "collective", "disk")
            for dtype in ("F32", "BF16")
            for receivers in arguments.receivers
            if only in (None, transport)
        ]
    text = table(results) + "\n" + notes(results, load)
    print(text)
    if only is None:
        write_result("sync", {"load_average": load, "results": results}, text)


if __name__ == "__main__":
    main()
