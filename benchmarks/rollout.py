"""How fast tokens are sampled: our embedded engine, transformers' `generate`, and vLLM's CPU build, on the same models.

    ./run bench rollout [--sizes 128x4 256x6 512x8] [--vocabularies 512 32000] [--dtypes fp32 bf16] [--work a b]

Random models of Qwen3's architecture. Work (a): 64 prompts of 16 tokens, 128 new tokens each. Work (b): 16 prompts of
24 to 72 tokens, 8 responses each, of long-tailed lengths (median 40, longest 256) that are the same for all. Tokens are
sampled from the softmax, each with its logprob. Contestants live in processes of their own, load the same weights, and
take turns round by round, so that a busy machine is busy for all; ratios are medians over rounds. Two threads on a busy
machine mostly wait for one another: `--threads 1` and the ratios of CPU time say more there.

The GEMM bound of (a) is the time that the matrix products of 128 decoding steps would take with nothing between them.
The bound with memory adds what every decoding step must read besides: each row's keys and values, once.
Results are added to those that benchmarks/results/rollout.json already has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import REPOSITORY, RESULTS, peer_python, write_result

from roll_core.errors import ExtensionError
from roll_kernels.decode import library

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = {"128x4": (128, 4, 32), "256x6": (256, 6, 64), "512x8": (512, 8, 64)}
"""Hidden size, layers, head size. Half as many key heads as query heads; intermediate size 3 × hidden size."""
CONTESTANTS = ("roll", "transformers", "vllm")
NEW_TOKENS = 128
TARGETS = {"a": {"transformers": 1.25, "vllm": 1.25}, "b": {"transformers": 3.0, "vllm": 1.25}}
"""Least speed-up by kind of work."""
GEMM_TARGET = 0.85
"""Least share of the GEMM bound at 512 × 8."""
WITH_MEMORY = "packed and memory"
PROMPT_TOKENS = 16
"""Of each prompt of work (a)."""


class Contestant:
    """A process that answers one line of JSON with one."""

    def __init__(self, name: str, directory: str, dtype: str, threads: int) -> None:
        self.name = name
        python = str(vllm_python()) if name == "vllm" else sys.executable
        script = str(Path(__file__).parent / "peers" / "rollout_contestant.py")
        self.process = subprocess.Popen(
            [python, script, name, directory, dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("ROLL_BENCH_QUIET", "1") == "1" else None,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )
        self._read()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        if self.process.stdin is None:
            raise RuntimeError("the contestant has no input")
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}; set ROLL_BENCH_QUIET=0 to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def vllm_python() -> Path:
    """The build that the plugin is tested beside, without anything of ours."""
    plugin = (REPOSITORY / "packages" / "roll-infer-vllm" / "pyproject.toml").read_text(encoding="utf-8")
    engine = tomllib.loads(plugin)["tool"]["roll"]["engine"]
    return peer_python("peer-vllm", [*engine["requirements"], "torch==2.13.0"], remove=engine["remove"])


def work(kind: str, vocabulary: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if kind == "a":
        return {"prompts": rng.integers(3, vocabulary, (64, PROMPT_TOKENS)).tolist(), "lengths": [NEW_TOKENS] * 64}
    prompts = [rng.integers(3, vocabulary, int(rng.integers(24, 73))).tolist() for _ in range(16)]
    lengths = np.clip(np.rint(rng.lognormal(np.log(40), 0.8, 128)), 1, 256).astype(int)
    lengths[int(lengths.argmax())] = 256
    return {"prompts": [each for each in prompts for _ in range(8)], "lengths": lengths.tolist()}


def cache_bytes(size: str, dtype: str) -> int:
    """Of keys and values that the decoding steps of work (a) read: position by position, none twice in a step."""
    hidden, layers, head = SIZES[size]
    position = 2 * layers * (hidden // head // 2) * head * {"fp32": 4, "bf16": 2}[dtype]
    return 64 * position * sum(range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS))


def make_model(directory: str, size: str, vocabulary: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, head = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 2,
        head_dim=head,
        intermediate_size=3 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def measure(
    size: str, vocabulary: int, dtype: str, kinds: Sequence[str], rounds: int, threads: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, size, vocabulary)
        contestants = [Contestant(name, directory, dtype, threads) for name in CONTESTANTS]
        try:
            for kind in kinds:
                num_read = cache_bytes(size, dtype) if kind == "a" else 0
                yield (
                    f"{size}/{vocabulary}/{dtype}/{kind}/{threads}",
                    _one_work(contestants, work(kind, vocabulary), num_read, rounds),
                )
        finally:
            for each in contestants:
                each.close()


def _one_work(contestants: Sequence[Contestant], task: dict[str, Any], num_read: int, rounds: int) -> dict[str, Any]:
    """With `num_read`, the bytes of keys and values that the work reads, bounds are measured beside it."""
    for each in contestants:
        each.ask({**task, "lengths": [min(8, n) for n in task["lengths"]]})
    runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contestants}
    gemm: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for each in contestants:
            answer = each.ask(task)
            if answer.pop("lengths") != task["lengths"]:
                raise RuntimeError(f"{each.name} did not generate what it was asked to")
            runs[each.name].append(answer)
            if each.name == "roll" and num_read:
                for name, (wall, cpu) in each.ask({"gemm_rows": 64}).items():
                    gemm.setdefault(name, []).append((wall * NEW_TOKENS, cpu * NEW_TOKENS))
                read = each.ask({"read_bytes": num_read})["read"]
                packed = gemm["onednn, packed"][-1]
                gemm.setdefault(WITH_MEMORY, []).append((packed[0] + read[0], packed[1] + read[1]))
    tokens = sum(task["lengths"])
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    cell: dict[str, Any] = {
        "tokens": tokens,
        "kernels": kernels(),
        "tokens_per_second": {name: round(tokens / statistics.median(found)) for name, found in seconds.items()},
        "cpu_seconds": {
            name: round(statistics.median(run["cpu_seconds"] for run in found), 3) for name, found in runs.items()
        },
        "seconds": {name: [round(each, 4) for each in found] for name, found in seconds.items()},
        "speedup": {
            name: round(statistics.median(p / r for p, r in zip(seconds[name], seconds["roll"], strict=True)), 2)
            for name in CONTESTANTS[1:]
        },
        "cpu_speedup": {
            name: round(
                statistics.median(
                    p["cpu_seconds"] / r["cpu_seconds"] for p, r in zip(runs[name], runs["roll"], strict=True)
                ),
                2,
            )
            for name in CONTESTANTS[1:]
        },
    }
    cell["parts"] = contestants[0].ask({**task, "parts": True})
    if gemm:
        cell["gemm_seconds"] = {name: [round(x, 4) for x in min(found)] for name, found in gemm.items()}
        own = [(run["seconds"], run["cpu_seconds"]) for run in runs["roll"]]
        cell["share_of_gemm_bound"] = {
            name: [
                round(statistics.median(g[clock] / r[clock] for g, r in zip(found, own, strict=True)), 3)
                for clock in (0, 1)
            ]
            for name, found in gemm.items()
        }
    return cell


def kernels() -> str:
    """What our engine decodes with here."""
    try:
        library()
    except ExtensionError:
        return "torch"
    return "compiled"


def table(cells: dict[str, Any]) -> str:
    lines = [
        "Tokens per second, medians over rounds; the contestants took turns on the same machine. Speed-ups are medians",
        "of the ratios of one round: of wall time, and (in brackets) of CPU time. The GEMM bound is the time of the",
        "matrix products alone, in the model's order on its own weights: `linear` is torch's default kernel, `onednn`",
        "another that it has, `packed` the same on weights that it has laid out for itself beforehand, as ours are;",
        "`packed and memory` adds reading each row's keys and values once in every step, at the rate of a sum.",
        "`time goes to`: shares of our wall time, measured in one more round with a clock around each part.",
        "`spread` is the slowest round over the fastest, of the contestant where that is largest: near 1 if quiet.",
        "",
        "| model | vocabulary | dtype | work | threads | kernels | roll | transformers | vLLM"
        " | × transformers | × vLLM | spread | of the GEMM bound | time goes to |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(cells):
        size, vocabulary, dtype, kind, threads = name.split("/")
        cell = cells[name]
        speed, ratio, cpu = cell["tokens_per_second"], cell["speedup"], cell["cpu_speedup"]
        spread = max(max(each) / min(each) for each in cell["seconds"].values())
        bound = ", ".join(
            f"{k} {wall:.0%} ({cpu:.0%})" for k, (wall, cpu) in cell.get("share_of_gemm_bound", {}).items()
        )
        lines.append(
            f"| {size} | {vocabulary} | {dtype} | {kind} | {threads} | {cell['kernels']}"
            f" | {speed['roll']} | {speed['transformers']} | {speed['vllm']}"
            f" | {ratio['transformers']:.2f} ({cpu['transformers']:.2f}) | {ratio['vllm']:.2f} ({cpu['vllm']:.2f})"
            f" | {spread:.1f} | {bound} | {where(cell)} |"
        )
    return "\n".join([*lines, "", *misses(cells)])


def where(cell: dict[str, Any]) -> str:
    """The parts of our time, the largest first; nothing of cells that are older than the clock."""
    parts = sorted(cell.get("parts", {}).items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in parts)


def misses(cells: dict[str, Any]) -> list[str]:
    """Which targets are missed, by how much, and what is in the way."""
    found = []
    for name in sorted(cells):
        size, _, _, kind, _ = name.split("/")
        cell, wanted = cells[name], TARGETS[kind]
        for peer, target in wanted.items():
            if cell["speedup"][peer] < target:
                found.append(
                    f"* {name}: {cell['speedup'][peer]:.2f} × {peer}, target {target}{_needed(cell, peer, target)}"
                )
        shares = cell.get("share_of_gemm_bound", {}).values()
        if size == "512x8" and shares and min(wall for wall, _ in shares) < GEMM_TARGET:
            share = min(wall for wall, _ in shares)
            found.append(f"* {name}: {share:.0%} of the GEMM bound, target {GEMM_TARGET:.0%}{_reachable(cell)}")
    if not found:
        return ["All targets are met."]
    return [
        "Missed targets:",
        "",
        *found,
        "",
        "The GEMM bound has neither attention nor prompts nor draws; the last column says what each takes.",
    ]


def _needed(cell: dict[str, Any], peer: str, target: float) -> str:
    """What share of the GEMM bound a target is: the products are the same for everybody."""
    shares = cell.get("share_of_gemm_bound", {}).values()
    if not shares:
        return ""
    share = min(wall for wall, _ in shares)
    return f", which is {share * target / cell['speedup'][peer]:.0%} of the GEMM bound; {share:.0%} are reached"


def _reachable(cell: dict[str, Any]) -> str:
    """What share of the GEMM bound would be left if keys and values were read and nothing else were done."""
    if WITH_MEMORY not in cell["gemm_seconds"]:
        return ""
    most = cell["gemm_seconds"]["onednn, packed"][0] / cell["gemm_seconds"][WITH_MEMORY][0]
    return f"; {most:.0%} if nothing were done but the products and reading keys and values"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[512, 32000])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--work", nargs="+", choices=["a", "b"], default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    path = RESULTS / "rollout.json"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else {}
    for size in options.sizes:
        for vocabulary in options.vocabularies:
            for dtype in options.dtypes:
                for name, cell in measure(size, vocabulary, dtype, options.work, options.rounds, options.threads):
                    cells[name] = cell
                    print(name, json.dumps(cell), flush=True)
                    write_result("rollout", {"cells": cells}, table(cells))
    write_result("rollout", {"cells": cells}, table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
