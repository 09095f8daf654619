"""Products with a weight, as training and scoring compute them: torch's own kernel in fp32 and bf16, and oneDNN's.

    ./run bench products [--rounds 15]

`roll_kernels.products` chooses between the two in fp32 by the sizes; this is what its choice rests on. All take turns
within a round; a speed-up is the median of the rounds' ratios of CPU time. bf16 is faster if the processor has AMX or
AVX512-BF16, and slower otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from common import REPOSITORY, write_result

from roll_kernels.products import ONEDNN_MIN_PRODUCTS, ONEDNN_MIN_WEIGHTS, onednn_linear, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = (
    (64, 128, 128),
    (512, 64, 64),
    (512, 128, 128),
    (512, 128, 384),
    (512, 128, 512),
    (2048, 256, 256),
    (2048, 256, 512),
    (2048, 512, 1536),
    (131, 256, 32_000),
)
"""Rows, inputs, outputs."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """GFLOP per CPU second of each.

    And how much faster oneDNN is, forwards and backwards to inputs and weight, and bf16 than the faster of fp32.
    """
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    grad = torch.randn(rows, outputs)
    x_bf16, weight_bf16 = x.bfloat16(), weight.bfloat16()
    contestants: dict[str, Callable[[], object]] = {
        "torch": lambda: F.linear(x, weight),
        "onednn": lambda: onednn_linear(x, weight),
        "bf16": lambda: F.linear(x_bf16, weight_bf16),
        "torch_back": lambda: grad @ weight,
        "onednn_back": lambda: onednn_linear(grad, weight.t()),
        "torch_weight": lambda: grad.T @ x,
        "onednn_weight": lambda: weight_gradient(grad, x),
    }
    flop = 2.0 * rows * inputs * outputs
    repeats = max(1, int(2e9 / flop))
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            spent = seconds(work, repeats)
            if number:
                took[name].append(spent)
    found = {f"{name}_gflops": flop / statistics.median(each) / 1e9 for name, each in took.items()}
    for end in ("", "_back", "_weight"):
        ratios = [slow / fast for slow, fast in zip(took[f"torch{end}"], took[f"onednn{end}"], strict=True)]
        found[f"speedup{end}"] = statistics.median(ratios)
    fp32 = map(min, took["torch"], took["onednn"])
    found["speedup_bf16"] = statistics.median(slow / fast for slow, fast in zip(fp32, took["bf16"], strict=True))
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results/products.*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    results = {}
    lines = [
        "| rows × inputs × outputs | torch GFLOP/s | oneDNN GFLOP/s | × | to the inputs: × | to the weight: × |"
        " bf16: × |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    with torch.inference_mode():
        for shape in SHAPES:
            found = measure(shape, options.rounds)
            name = " × ".join(f"{each:,}" for each in shape)
            results[name] = found
            lines.append(
                f"| {name} | {found['torch_gflops']:.0f} | {found['onednn_gflops']:.0f} | {found['speedup']:.2f} |"
                f" {found['speedup_back']:.2f} | {found['speedup_weight']:.2f} |"
                f" {found['speedup_bf16']:.2f} |"
            )
    table = "\n".join(lines)
    print(table)
    threads = torch.get_num_threads()
    path = write_result(
        "products",
        {"threads": threads, "rounds": options.rounds, "shapes": results},
        f"{threads} threads, medians of {options.rounds} rounds. Weights of at least {ONEDNN_MIN_WEIGHTS:,}"
        f" elements, and products of at least {ONEDNN_MIN_PRODUCTS:,} multiplications, go to oneDNN.\n\n{table}",
    )
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
