"""Logprobs and their gradients, a chunk of tokens at a time, beside plain torch on all tokens at once.

    ./run bench head_chunks [--rounds 3] [--threads 1] [--dtype float32 bfloat16] [--hidden 64 512] [--vocab 14 510]

CPU seconds of plain torch (`F.linear`, `log_softmax`, `gather`) divided by those of chunks of the default size, which
`roll_modeling.memory.head_chunk` chooses on the host; the median of rounds that take turns. Forward and backward, once
of logprobs alone and once with entropies and their gradients. Aim: at least 1 in every row of more than 10 ms; in
smaller ones, calls cost as much as products.

Rows above `--most-gflop` get fewer tokens. Entropies add nothing to products, so that they are left out where these
dominate. A part of the grid replaces its rows of an earlier result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from common import RESULTS, write_result

from roll_modeling.logprobs import HeadRequest, LinearHead, head_outputs
from roll_modeling.memory import head_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, VOCAB, TOKENS = (64, 512, 1024, 2048), (14, 510, 32_000, 152_000), (512, 4096)
DTYPES = ("float32", "bfloat16")
MIN_SECONDS, MOST_ROUNDS = 0.3, 40
"""A row is repeated for this many seconds, at most this many times."""
MOST_ENTROPY_GFLOP = 100.0
"""Maximum size of rows with entropies."""


def gflop(vocab_size: int, hidden_size: int, tokens: int) -> float:
    """Forward and backward of plain torch."""
    return 6e-9 * vocab_size * hidden_size * tokens


def measure(vocab_size: int, hidden_size: int, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Seconds of plain torch and its ratios to the default chunk, with and without entropies."""
    weight = (0.02 * torch.randn(vocab_size, hidden_size)).to(dtype).requires_grad_()
    hidden = torch.randn(tokens, hidden_size).to(dtype).requires_grad_()
    targets, slopes = torch.randint(0, vocab_size, (tokens,)), list(torch.randn(2, tokens))

    def plain(entropy: bool) -> list[torch.Tensor]:
        logp = torch.log_softmax(F.linear(hidden, weight).float(), dim=-1)
        chosen = logp.gather(1, targets[:, None])[:, 0]
        return [chosen, -(logp.exp() * logp).sum(dim=-1)] if entropy else [chosen]

    def chunked(entropy: bool) -> list[torch.Tensor]:
        found = head_outputs(LinearHead(weight=weight), hidden, targets, HeadRequest(entropy=entropy))
        return [each for each in (found.logprobs_N, found.entropy_N) if each is not None]

    def seconds(work: Callable[[bool], list[torch.Tensor]], entropy: bool) -> float:
        weight.grad = hidden.grad = None
        start = time.process_time()
        outputs = work(entropy)
        torch.autograd.backward(outputs, slopes[: len(outputs)])
        return time.process_time() - start

    found: dict[str, Any] = {}
    modes = {"logprobs": False, "entropy": True}
    if gflop(vocab_size, hidden_size, tokens) > MOST_ENTROPY_GFLOP:
        del modes["entropy"]
    for name, entropy in modes.items():
        took: list[tuple[float, float]] = []
        begin = time.monotonic()
        while len(took) <= rounds or (time.monotonic() - begin < MIN_SECONDS and len(took) < MOST_ROUNDS):
            took.append((seconds(plain, entropy), seconds(chunked, entropy)))
        found[name] = round(statistics.median(theirs / ours for theirs, ours in took[1:]), 2)  # the first warms up
        if not entropy:
            found["plain_s"] = round(statistics.median(theirs for theirs, _ in took[1:]), 5)
    return found


def write(rows: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the result file of all rows so far."""
    lines = [
        f"Threads: {arguments.threads}. CPU seconds of plain torch, forward and backward of logprobs; its ratio to the"
        f" default chunk; the same with entropies. Median of rounds, at least {arguments.rounds}.\n",
        "| dtype | vocabulary × hidden, tokens | chunk | plain torch | logprobs | with entropy |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for key, row in sorted(rows.items(), key=lambda item: item[1]["at"]):
        dtype, _, shape = key.partition(", ")
        ratios = " | ".join(f"{row[name]:.2f} ×" if name in row else "–" for name in ("logprobs", "entropy"))
        lines.append(f"| {dtype} | {shape} | {row['chunk']:,} | {row['plain_s']:.4f} | {ratios} |")
    least, worst = min((row[name], key) for key, row in rows.items() for name in ("logprobs", "entropy") if name in row)
    lines.append(f"\nWorst row: {worst}, {least:.2f} ×.")
    lines.append(f"\nLoad of the machine: {os.getloadavg()[0]:.1f}.")
    write_result("head_chunks", {"threads": arguments.threads, "rows": rows}, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--hidden", nargs="+", type=int, default=HIDDEN)
    parser.add_argument("--vocab", nargs="+", type=int, default=VOCAB)
    parser.add_argument("--most-gflop", type=float, default=450.0, help="of forward and backward of plain torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = RESULTS / "head_chunks.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("rows", {}) if path.is_file() else {}
    for dtype, vocab_size, hidden_size in product(arguments.dtype, arguments.vocab, arguments.hidden):
        most = int(arguments.most_gflop / gflop(vocab_size, hidden_size, 1)) // 128 * 128
        for tokens in sorted({min(each, most) for each in TOKENS}):
            key = f"{dtype}, {vocab_size:,} × {hidden_size:,}, {tokens:,}"
            rows[key] = measure(vocab_size, hidden_size, tokens, getattr(torch, dtype), arguments.rounds)
            rows[key]["chunk"] = min(tokens, head_chunk(vocab_size, on_host=True))
            rows[key]["at"] = [dtype, vocab_size, hidden_size, tokens]
            print(f"{key}: {rows[key]}", flush=True)
            write(rows, arguments)


if __name__ == "__main__":
    main()
