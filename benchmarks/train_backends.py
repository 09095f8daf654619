"""Train strategies on two processes beside plain torch DDP: speed, memory, checkpoints.

    ./run bench train_backends [--rounds N] [--contestants NAME ...]

A random Qwen3-style model (hidden 512 × 8 layers, vocabulary 512, float32) on two ranks of one thread each, which talk
over gloo; 8 sequences of 128 tokens for each rank in a step, of equal length, so that nobody pads. Contestants live
side by side and take turns round by round; a ratio is the median of the rounds' ratios of CPU time, which other work on
the machine disturbs least, and of the time by the clock.

Memory is that of one rank: what a strategy says that it holds between steps against what arithmetic says, and the peak
of its resident memory in a step over what the process had when it had imported everything and built nothing.

A checkpoint is written to the folder for temporary files, and compared with writing and reading as many bytes plainly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import REPOSITORY, peer_python, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, SEQUENCES, LENGTH = 2, 8, 128
PACKAGES = (
    "roll-core",
    "roll-modeling",
    "roll-rewards",
    "roll-strategy-hf",
    "roll-strategy-fsdp2",
    "roll-strategy-deepspeed",
    "roll-tools",
    "roll-trackers",
    "roll-weight-transports",
)
DESPITE = ["deepspeed>=0.19,<0.20"]
MODEL = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def zero(stage: int) -> str:
    # Nothing is small enough to stay whole, so that memory is what arithmetic says.
    keys = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return "deepspeed_train " + json.dumps({"zero_optimization": keys})


CONTESTANTS = {
    "ddp": ("ddp", (4, 4, 8)),
    "hf": ("hf_train {}", (4, 4, 8)),
    "fsdp2": ("fsdp2_train {}", (4 / RANKS, 4 / RANKS, 8 / RANKS)),
    "zero0": (zero(0), (4, 4, 8)),
    "zero1": (zero(1), (4, 4, 8 / RANKS)),
    "zero2": (zero(2), (4, 4 / RANKS, 8 / RANKS)),
    "zero3": (zero(3), (4 / RANKS, 4 / RANKS, 8 / RANKS)),
}
"""What runs, and bytes per parameter on a rank: weights, gradients, AdamW's two moments."""


class Contestant:
    """All ranks of one."""

    def __init__(self, python: Path, contestant: str, model: Path) -> None:
        script = REPOSITORY / "benchmarks" / "peers" / "train_rank.py"
        arguments = [str(RANKS), str(free_port()), str(model), str(SEQUENCES), str(LENGTH)]
        self.ranks = [
            subprocess.Popen(
                [str(python), str(script), contestant, str(rank), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("ROLL_BENCH_QUIET", "1") == "0" else subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"},
            )
            for rank in range(RANKS)
        ]
        self.memory = self._answers()

    def ask(self, act: str) -> dict[str, float]:
        """All ranks at once; the sum of what the CPU took, the longest time by the clock."""
        for rank in self.ranks:
            if rank.stdin is None:
                raise RuntimeError("the rank has no input")
            rank.stdin.write(act + "\n")
            rank.stdin.flush()
        found = self._answers()
        return {"wall_s": max(each["wall_s"] for each in found), "cpu_s": sum(each["cpu_s"] for each in found)}

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(60)
            except subprocess.TimeoutExpired:
                rank.kill()

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for rank in self.ranks:
            line = rank.stdout.readline() if rank.stdout is not None else ""
            if not line:
                raise RuntimeError(f"a rank ended with {rank.wait()}; set ROLL_BENCH_QUIET=0 to see why")
            found.append(json.loads(line))
        return found


def free_port() -> int:
    """One that nobody has now."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def make_model(folder: Path) -> int:
    """Writes it; returns the number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig

    keys = {key: value for key, value in MODEL.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(MODEL["model_type"]), **keys))
    model.save_pretrained(folder)
    make_tokenizer(TokenizerConfig(kind="byte"), (), folder)
    return sum(each.numel() for each in model.parameters())


def checkpoint(contestant: Contestant, folder: Path) -> dict[str, float]:
    """Seconds of writing and reading a state, and of writing and reading as many bytes plainly, right afterwards."""
    folder.mkdir()
    written = contestant.ask(f"save {folder}")["wall_s"]
    files = [each for each in folder.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files)
    read = contestant.ask(f"load {folder}")["wall_s"]
    block = os.urandom(1 << 20)
    start = time.perf_counter()
    plain = folder / "plain"
    with plain.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
    plain_written = time.perf_counter() - start
    start = time.perf_counter()
    with plain.open("rb") as file:
        while file.read(1 << 20):
            pass
    plain_read = time.perf_counter() - start
    plain.unlink()
    return {
        "bytes": size,
        "write_mb_s": size / written / 1e6,
        "read_mb_s": size / read / 1e6,
        "of_plain_write": plain_written / written,
        "of_plain_read": plain_read / read,
    }


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """By contestant; `ddp` is always among them."""
    python = peer_python(
        "train_backends", [part for each in PACKAGES for part in ("-e", f"./packages/{each}")], despite=DESPITE
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_parameters = make_model(folder / "model")
        running = {name: Contestant(python, CONTESTANTS[name][0], folder / "model") for name in names}
        took: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, each in running.items():
                took[name].append(each.ask("step"))
        for name, each in running.items():
            results[name] = {
                "tokens_per_s": RANKS * SEQUENCES * LENGTH / statistics.median(one["wall_s"] for one in took[name]),
                "seconds": [round(one["wall_s"], 3) for one in took[name]],
                **{f"times_ddp_{kind}": ratio(took, name, f"{kind}_s") for kind in ("cpu", "wall")},
                "expected_bytes": round(sum(CONTESTANTS[name][1]) * num_parameters),
                "held_bytes": [sum(v for k, v in rank.items() if k != "peak_bytes") for rank in each.memory],
                "peak_bytes": [rank["peak_bytes"] for rank in each.memory],
                "checkpoint": checkpoint(each, folder / name),
            }
            each.close()
    return {"parameters": num_parameters, "contestants": results}


def ratio(took: dict[str, list[dict[str, float]]], name: str, key: str) -> float:
    """How much faster than DDP, the median over rounds."""
    return statistics.median(ddp[key] / own[key] for ddp, own in zip(took["ddp"], took[name], strict=True))


def table(found: dict[str, Any]) -> str:
    """For readers."""
    lines = [
        f"{found['parameters'] / 1e6:.1f} million parameters in float32, {RANKS} ranks of one thread each.",
        "",
        "| contestant | tokens/s | × DDP by the clock | × DDP by CPU time | held on a rank | arithmetic says | peak in"
        " a step | checkpoint | written, MB/s | of a plain write | read, MB/s | of a plain read |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, each in found["contestants"].items():
        held, saved = max(each["held_bytes"]), each["checkpoint"]
        lines.append(
            f"| {name} | {each['tokens_per_s']:.0f} | {each['times_ddp_wall']:.2f} | {each['times_ddp_cpu']:.2f}"
            f" | {f'{held / 1e6:.0f} MB' if held else ''} | {each['expected_bytes'] / 1e6:.0f} MB"
            f" | {max(each['peak_bytes']) / 1e6:.0f} MB | {saved['bytes'] / 1e6:.0f} MB | {saved['write_mb_s']:.0f}"
            f" | {saved['of_plain_write']:.0%} | {saved['read_mb_s']:.0f} | {saved['of_plain_read']:.0%} |"
        )
    lines += [
        "",
        "`held` is what the strategy says that it keeps between steps, gradients included where they stay allocated.",
        "The peak has activations and buffers of collectives on top. A plain write and read go through the page cache.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results/train_backends.*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    options = parser.parse_args()
    names = [name for name in CONTESTANTS if name == "ddp" or name in options.contestants]
    found = measure(names, options.rounds)
    print(table(found))
    write_result("train_backends", {"rounds": options.rounds, **found}, table(found))


if __name__ == "__main__":
    main()
