"""Digests, publishes and offloads on the second simulated device: `weight_traffic.py` in an empty folder.

Writes `results.json`: digests of device and host, traffic between them by part, and whether offloaded bits return.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll_core.runtime.weights.transfer import sample_fingerprint
from roll_core.spec.multilinear import CHUNK_BYTES, MULTILINEAR, SPAN_BYTES, keys
from roll_core.spec.weights import digest, make_manifest, memory_token, tensor_entry
from roll_core.types import WeightManifest
from roll_infer_hf.loaded_weights import LoadedWeights
from roll_modeling.offload import Offloader
from roll_platform_sim.trace import Trace
from roll_weight_transports.bucket_plan import fill, plan_buckets, views

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("sim:1")
SIZES = (1, 5, 7 * 33, CHUNK_BYTES // 2 + 1, SPAN_BYTES // 2 + CHUNK_BYTES + 3)


def traffic(act: Callable[[], Any]) -> dict[str, int]:
    """Copies and waits of `act`, and bytes copied to the host."""
    with Trace() as trace:
        act()
    found: Counter[str] = Counter()
    for event, number in trace.events.items():
        found[event.kind] += number
        found["d2h_bytes"] += trace.num_bytes[event] if event.kind == "d2h" else 0
    return {kind: found[kind] for kind in ("d2h", "d2h_bytes", "h2d", "wait")}


def digests() -> list[tuple[str, str]]:
    """Digests of each tensor by device and host; the last are of a slice that is not aligned to words."""
    torch.manual_seed(0)
    tensors = [torch.randn(size).bfloat16() for size in SIZES]
    pairs = [(each.to(DEVICE), each) for each in tensors]
    pairs += [(pairs[-1][0].view(-1, 1)[1:], tensors[-1].view(-1, 1)[1:]), (keys(DEVICE), keys())]
    return [(digest(device, MULTILINEAR), digest(host, MULTILINEAR)) for device, host in pairs]


def publishes() -> dict[str, dict[str, int]]:
    """Traffic of each part of a publish: handed over, or through buckets as by `cuda_ipc`."""
    trainer, shared, copying = (torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(20)) for _ in range(3))
    weights = [(name, each.detach()) for name, each in trainer.to(DEVICE).named_parameters()]
    tokens = tuple(tensor_entry(name, each, memory_token(each)) for name, each in weights)
    handed_over = WeightManifest(version=1, tensors=tokens)
    borrower = LoadedWeights(shared.to(DEVICE), role="engine", rank=0)
    found = {
        "sample": traffic(lambda: sample_fingerprint(weights)),
        "sample of pages": traffic(lambda: sample_fingerprint(weights, sample_bytes=1 << 17)),
        "shared": traffic(lambda: borrower.update(1, 0, handed_over, weights, shared=True)),
    }
    manifest = make_manifest(1, weights, MULTILINEAR)
    (bucket,) = plan_buckets(manifest, 1 << 30)
    memory = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=DEVICE)
    found["sender"] = traffic(lambda: fill(memory, bucket, iter(weights)))
    engine = LoadedWeights(copying.to(DEVICE), role="engine", rank=0)
    receipts = []

    def receive() -> None:
        receipts.append(engine.update(1, 0, manifest, views(memory, bucket), shared=False))

    found["receiver"] = traffic(receive)
    assert receipts[0].digests == {entry.name: entry.digest for entry in manifest.tensors}
    return found


def changed_samples() -> list[bool]:
    """Whether the sample of a large tensor changes with an element of a sampled page, and of none."""
    tensor = torch.zeros(1 << 20, device=DEVICE)

    def sample() -> str:
        return sample_fingerprint([("w", tensor)], sample_bytes=1 << 20)

    before, found = sample(), []
    for index in (0, 3 << 16, 1 << 14):  # pages of 2^14 elements, each fourth of which is read
        tensor[index] = 1
        found.append(sample() != before)
        tensor[index] = 0
    return [*found, sample() == before]


def offloads() -> dict[str, Any]:
    """Traffic of an offload and an onload, whether bits and memory return, and the largest allocation meanwhile."""
    torch.manual_seed(1)
    tensors = [torch.randn(size, device=DEVICE) for size in (*SIZES, *[1000] * 60)]
    zeros = torch.zeros(999, device=DEVICE)
    before = [each.cpu() for each in tensors]
    num_bytes = torch.accelerator.memory_allocated(DEVICE)
    offloader = Offloader("student", DEVICE)
    found: dict[str, Any] = {"num_bytes": num_bytes, "left": [], "equal": []}
    for part in ("optimizer", "grads", "optimizer"):
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        found[f"offload {part}"] = traffic(lambda part=part: offloader.offload(part, [*tensors, zeros]))
        found["left"].append(torch.accelerator.memory_reserved(DEVICE))
        found[f"onload {part}"] = traffic(lambda part=part: offloader.onload(part))
        found["peak"] = torch.accelerator.max_memory_allocated(DEVICE)
        found["equal"].append(all(torch.equal(each.cpu(), other) for each, other in zip(tensors, before, strict=True)))
        found["equal"].append(not bool(zeros.any()))
    offloader.close()
    return found


def main() -> None:
    parts = (digests, publishes, changed_samples, offloads)
    Path("results.json").write_text(json.dumps({each.__name__: each() for each in parts}), encoding="utf-8")


if __name__ == "__main__":
    main()
