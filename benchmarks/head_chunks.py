"""Logprobs of a large vocabulary and their gradients, a chunk of tokens at a time, beside plain torch on all at once.

    ./run bench head_chunks [--rounds 3] [--threads 1]

CPU seconds of forward and backward, the best of the rounds, which take turns. `default` is what
`roll_modeling.memory.head_chunk` chooses on the host. Aim: the default is never slower than plain torch, which has
the logits of all tokens several times over.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from common import write_result

from roll_modeling.logprobs import HeadRequest, LinearHead, head_outputs
from roll_modeling.memory import head_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((152_000, 512, 384), (32_000, 256, 2048), (510, 256, 4096))
"""Vocabulary, hidden size, tokens."""
CHUNKS = (27, 64, 256)


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """CPU seconds by chunk."""
    vocab_size, hidden_size, tokens = shape
    weight = (0.02 * torch.randn(vocab_size, hidden_size)).requires_grad_()
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    targets, upstream = torch.randint(0, vocab_size, (tokens,)), torch.randn(tokens)

    def chunked(size: int | None) -> Callable[[], torch.Tensor]:
        request = HeadRequest(chunk_tokens=size)
        return lambda: head_outputs(LinearHead(weight=weight), hidden, targets, request).logprobs_N

    def plain() -> torch.Tensor:
        return torch.log_softmax(F.linear(hidden, weight), dim=-1).gather(1, targets[:, None])[:, 0]

    contestants = {"plain": plain, "default": chunked(None), **{str(size): chunked(size) for size in CHUNKS}}
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            weight.grad = hidden.grad = None
            start = time.process_time()
            work().backward(upstream)
            took[name].append(time.process_time() - start)
    return {name: round(min(each), 3) for name, each in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = ["plain", "default", *map(str, CHUNKS)]
    lines = [
        f"| vocabulary × hidden, tokens | default chunk | {' | '.join(names)} | plain / default |",
        f"|---|--:|{'--:|' * len(names)}--:|",
    ]
    results = {}
    for shape in SHAPES:
        found = measure(shape, arguments.rounds)
        vocab_size, hidden_size, tokens = shape
        results[f"{vocab_size} x {hidden_size}, {tokens}"] = found
        cells = " | ".join(f"{found[name]:.2f}" for name in names)
        lines.append(
            f"| {vocab_size:,} × {hidden_size}, {tokens:,} | {head_chunk(vocab_size, on_host=True):,} | {cells} |"
            f" {found['plain'] / found['default']:.2f} |"
        )
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    title = (
        f"{arguments.threads} threads; CPU seconds of forward and backward by chunk, the best of {arguments.rounds}."
    )
    write_result("head_chunks", {"threads": arguments.threads, "seconds": results}, f"{title}\n\n{table}")


if __name__ == "__main__":
    main()
