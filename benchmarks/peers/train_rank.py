"""One rank of a contestant of benchmarks/train_backends.py: answers one line of JSON with one.

python train_rank.py CONTESTANT RANK RANKS PORT MODEL SEQUENCES LENGTH

A contestant is `ddp`, plain torch, or a train strategy with its configuration as JSON: `fsdp2_train {}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

LEARNING_RATE = 1e-4


class Work:
    """What a rank computes: `SEQUENCES` of `LENGTH` tokens in a step."""

    def __init__(self, rank: int, num_ranks: int, port: int, model: str, sequences: int, length: int) -> None:
        self.rank, self.num_ranks, self.port, self.model = rank, num_ranks, port, model
        vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        self.tokens = torch.randint(3, vocab_size, (sequences, length), generator=torch.Generator().manual_seed(rank))


class PlainDDP:
    """What people write without a framework: transformers' model in DistributedDataParallel, AdamW."""

    def __init__(self, work: Work) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

        self.work, self.imported_bytes = work, resident_bytes("VmRSS")
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{work.port}", rank=work.rank, world_size=work.num_ranks
        )
        model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self) -> None:
        """Clipped to 1, as the strategies do."""
        self.ddp(input_ids=self.work.tokens, labels=self.work.tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> Mapping[str, int]:
        """Not asked: arithmetic does for plain torch."""
        return {}

    def save(self, path: Path) -> None:
        """Rank 0 writes everything."""
        if self.work.rank == 0:
            torch.save({"model": self.ddp.state_dict(), "optimizer": self.optimizer.state_dict()}, path / "state.pt")
        torch.distributed.barrier()

    def load(self, path: Path) -> None:
        """Every rank reads everything."""
        state = torch.load(path / "state.pt", weights_only=True)
        self.ddp.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group()


class Strategy:
    """A train strategy, as a run builds it."""

    def __init__(self, work: Work, name: str, config: Mapping[str, Any]) -> None:
        from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

        from roll_core.algorithms.losses import sft_objective
        from roll_core.data.pack import count_totals, pack
        from roll_core.plugins.registry import load_registry
        from roll_core.plugins.targets import load_target
        from roll_core.spec.model import MeshInfo, ModelSpec
        from roll_core.spec.providers import TrainProvider
        from roll_core.spec.train import TrainingSpec
        from roll_core.types import TrainSequence

        provider = load_registry().find(TrainProvider, name)
        settings = load_target(provider.config, owner=name).model_validate(dict(config))
        training = TrainingSpec(learning_rate=LEARNING_RATE, num_steps=1000, max_grad_norm=1.0)
        self.strategy = load_target(provider.target, owner=name)(settings, training)
        self.imported_bytes = resident_bytes("VmRSS")
        mesh = MeshInfo(
            role="sft_train",
            rank=work.rank,
            local_rank=work.rank,
            world_size=work.num_ranks,
            master_port=work.port,
            num_threads=torch.get_num_threads(),
        )
        self.strategy.build(ModelSpec(path=work.model), mesh)
        num, length = work.tokens.shape
        mask = torch.arange(length).numpy() > 0
        mine = [TrainSequence(id=str(i), tokens=each.numpy(), loss_mask=mask) for i, each in enumerate(work.tokens)]
        everything = count_totals(mine * work.num_ranks, max_length=length)
        self.micros, self.loss = pack(mine, totals=everything, max_sequences=num), sft_objective()

    def step(self) -> None:
        """One microbatch."""
        self.strategy.forward_backward(self.micros, self.loss)
        self.strategy.optimizer_step()

    def memory(self) -> Mapping[str, int]:
        """What it says that it holds."""
        return dict(self.strategy.memory())

    def save(self, path: Path) -> None:
        """Each rank into a folder of its own, as a run does."""
        own = path / f"rank-{self.strategy.data_rank.index}"
        own.mkdir(exist_ok=True)
        self.strategy.save(own)

    def load(self, path: Path) -> None:
        """The same."""
        self.strategy.load(path / f"rank-{self.strategy.data_rank.index}")

    def close(self) -> None:
        """End it."""
        self.strategy.close()


def resident_bytes(key: str) -> int:
    """`VmRSS` or `VmHWM`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def timed(act: Any, *arguments: Any) -> dict[str, float]:
    """Seconds by the clock and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    act(*arguments)
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Serve until the input ends."""
    contestant, rank, ranks, port, model, sequences, length = sys.argv[1:]
    torch.set_num_threads(1)
    work = Work(int(rank), int(ranks), int(port), model, int(sequences), int(length))
    # Whatever engines print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, _, config = contestant.partition(" ")
    subject: Any = PlainDDP(work) if name == "ddp" else Strategy(work, name, json.loads(config or "{}"))
    subject.step()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew, after what building took
    subject.step()
    peak = resident_bytes("VmHWM") - subject.imported_bytes
    print(json.dumps({"peak_bytes": peak, **subject.memory()}), file=answers, flush=True)
    acts = {"step": lambda: timed(subject.step)}
    for line in sys.stdin:
        act, _, path = line.strip().partition(" ")
        found = acts[act]() if act in acts else timed(getattr(subject, act), Path(path))
        print(json.dumps(found), file=answers, flush=True)
    subject.close()


if __name__ == "__main__":
    main()
