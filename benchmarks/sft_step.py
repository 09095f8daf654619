"""One optimizer step of SFT on ragged sequences: ours, TRL's SFTTrainer, and the GEMMs of the step alone.

    ./run bench sft_step [--rounds N] [--threads N] [--vocabulary N ...] [--without-peer]

A random Qwen3-style model (hidden 256 × 6 layers, float32), 32 sequences of 16 to 256 tokens, all activations kept.
The contestants take turns within one run and the best round of each counts, in CPU seconds of the whole process: other
work on the machine then disturbs the ratio least, and least of all with one thread each, which waits for no other.
Tokens are real ones, without padding. The share of the GEMM rate is the step's FLOP/s, those of causal attention
included, divided by the FLOP/s of the linear layers' products run alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import peer_python, write_result
from trl_steps import PEER, run_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.spec.train import MicroBatch, TrainStrategy
    from roll_core.types import TrainSequence

SEQUENCES, SHORTEST, LONGEST = 32, 16, 256
TOKENS_PER_MICROBATCH = 2048
VOCABULARIES = (512, 32_000)
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD = 256, 768, 6, 4, 2, 64


def architecture(vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "tie_word_embeddings": True,
    }


def make_sequences(vocab_size: int) -> list[TrainSequence]:
    import numpy as np

    from roll_core.types import TrainSequence

    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, SEQUENCES)
    return [
        TrainSequence(id=str(i), tokens=rng.integers(3, vocab_size, n), loss_mask=np.arange(n) > 0)
        for i, n in enumerate(lengths)
    ]


def make_strategy(vocab_size: int, tokenizer: Path, threads: int) -> TrainStrategy:
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.train import TrainingSpec
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy

    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-4, num_steps=1000, max_grad_norm=1.0))
    model = ModelSpec(random_init=architecture(vocab_size), tokenizer=str(tokenizer))
    strategy.build(model, MeshInfo(role="sft_train", num_threads=threads))
    return strategy


def timed(call: Callable[[], None]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


LINEAR = [(HIDDEN, HEADS * HEAD), (HIDDEN, KV_HEADS * HEAD), (HIDDEN, KV_HEADS * HEAD), (HEADS * HEAD, HIDDEN)]
LINEAR += [(HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
"""Input and output size of a layer's projections."""


def attention_flops(sequences: Sequence[TrainSequence], micros: Sequence[MicroBatch], vocab_size: int) -> float:
    """FLOPs of causal attention as a share of those of the linear layers and the head.

    Counts the keys that a query sees, not the masked ones. In both, the backward pass has twice the forward FLOPs.
    """
    visible = sum(len(each.tokens) * (len(each.tokens) + 1) // 2 for each in sequences)
    linear = sum(micro.num_tokens for micro in micros) * LAYERS * sum(i * o for i, o in LINEAR)
    head = sum(int(micro.loss_mask_T.sum()) for micro in micros) * HIDDEN * vocab_size
    return LAYERS * 2 * visible * HEADS * HEAD / (linear + head)


def gemms_of_a_step(micros: Sequence[MicroBatch], vocab_size: int) -> Callable[[], None]:
    """The three GEMMs of every linear layer and of the head, on the step's own numbers of tokens, without attention.

    Each by the faster of torch's two libraries, as training chooses it (`benchmarks/products.py` compares them).
    """
    import torch

    from roll_kernels.products import input_gradient, linear, weight_gradient
    from roll_modeling.logprobs import HeadRequest

    chunk = HeadRequest().chunk(vocab_size, torch.device("cpu"))
    jobs = []
    for micro in micros:
        jobs += [(micro.num_tokens, i, o) for i, o in LINEAR * LAYERS]
        rows = int(micro.loss_mask_T.sum())
        jobs += [(min(chunk, rows - at), HIDDEN, vocab_size) for at in range(0, rows, chunk)]
    operands = {
        job: (torch.randn(job[0], job[1]), torch.randn(job[2], job[1]), torch.randn(job[0], job[2]))
        for job in set(jobs)
    }

    def run() -> None:
        with torch.no_grad():
            for job in jobs:
                x, w, g = operands[job]
                linear(x, w)
                input_gradient(g, w)
                weight_gradient(g, x)

    return run


def peer_step(model: Path, rows: Path, steps: int, threads: int) -> dict[str, list[float]]:
    numbers = map(str, (SEQUENCES, steps, threads))
    return run_peer([str(peer_python("trl", PEER)), "peers/trl_sft.py", str(model), str(rows), *numbers])


def measure(vocab_size: int, rounds: int, *, threads: int, with_peer: bool) -> dict[str, Any]:
    from roll_core.algorithms.losses import sft_objective
    from roll_core.data.pack import pack
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(TokenizerConfig(kind="byte"), (), folder / "tokenizer")
        sequences = make_sequences(vocab_size)
        strategy = make_strategy(vocab_size, folder / "tokenizer", threads)
        strategy.export_model(folder / "model")
        rows = folder / "rows.json"
        rows.write_text(json.dumps([each.tokens.tolist() for each in sequences]), encoding="utf-8")
        micros = pack(sequences, max_tokens=TOKENS_PER_MICROBATCH)
        gemms = gemms_of_a_step(micros, vocab_size)

        def step() -> None:
            strategy.forward_backward(micros, sft_objective())
            strategy.optimizer_step()

        step()
        gemms()
        ours, bound, peer = [], [], []
        for _ in range(rounds):
            for _ in range(3):
                ours.append(timed(step))
                bound.append(timed(gemms))
            if with_peer:
                found = peer_step(folder / "model", rows, 4, threads)
                # The first step of a process warms up.
                peer += [
                    dict(zip(("cpu_s", "wall_s"), pair, strict=True)) for pair in zip(*found.values(), strict=True)
                ][1:]
        tokens = sum(len(each) for each in sequences)
        strategy.close()
    result: dict[str, Any] = {"vocab_size": vocab_size, "tokens": tokens, "padded": SEQUENCES * LONGEST}
    for label, runs in (("roll", ours), ("gemms_alone", bound), ("trl", peer)):
        if runs:
            result[label] = {
                "cpu_s": min(each["cpu_s"] for each in runs),
                "wall_s": min(each["wall_s"] for each in runs),
            }
            result[label]["tokens_per_cpu_s"] = tokens / result[label]["cpu_s"]
    result["share_of_linear_layers"] = result["gemms_alone"]["cpu_s"] / result["roll"]["cpu_s"]
    result["share_of_gemm_rate"] = result["share_of_linear_layers"] * (
        1 + attention_flops(sequences, micros, vocab_size)
    )
    if peer:
        result["times_trl"] = result["trl"]["cpu_s"] / result["roll"]["cpu_s"]
        result["times_trl_wall"] = result["trl"]["wall_s"] / result["roll"]["wall_s"]
    return result


NAMES = {"roll": "hf_train", "trl": "TRL SFTTrainer", "gemms_alone": "GEMMs of the step alone"}


def table(results: Sequence[dict[str, Any]], threads: int) -> str:
    lines = [
        f"{SEQUENCES} sequences of {SHORTEST} to {LONGEST} tokens, threads: {threads}, float32; best step of each.",
        "Targets: at least 2 × TRL in real tokens/s, at least 70 % of the GEMM rate.",
        "",
        "| vocabulary | contestant | CPU s | wall s | tokens per CPU second |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        for label, name in (
            ("roll", "hf_train"),
            ("trl", "TRL SFTTrainer"),
            ("gemms_alone", "GEMMs of the step alone"),
        ):
            if label in each:
                row = each[label]
                lines.append(
                    f"| {each['vocab_size']} | {name} | {row['cpu_s']:.2f} | {row['wall_s']:.2f}"
                    f" | {row['tokens_per_cpu_s']:.0f} |"
                )
    lines.append("")
    for each in results:
        lines.append(
            f"* vocabulary {each['vocab_size']}: {each['share_of_gemm_rate']:.0%} of the GEMM rate, causal attention's"
            f" FLOPs included ({each['share_of_linear_layers']:.0%} without them)"
        )
        if "times_trl" in each:
            bound = each["trl"]["cpu_s"] / each["gemms_alone"]["cpu_s"]
            lines[-1] += f"; {each['times_trl']:.2f} × TRL by CPU time, {each['times_trl_wall']:.2f} × by wall time"
            if each["times_trl"] < 2:
                lines[-1] += (
                    f". Missed by {2 / each['times_trl'] - 1:.0%}: with so small a vocabulary TRL wastes little beside"
                    f" the padding, and the GEMMs alone, at no other cost, would be {bound:.2f} × TRL, so 2 × needs"
                    f" {2 / bound:.0%} of the GEMM rate."
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--vocabulary", type=int, nargs="*", default=list(VOCABULARIES))
    arguments = parser.parse_args()
    threads, with_peer = arguments.threads, not arguments.without_peer
    results = [measure(each, arguments.rounds, threads=threads, with_peer=with_peer) for each in arguments.vocabulary]
    print(table(results, threads))
    if with_peer:
        write_result("sft_step", {"threads": threads, "results": results}, table(results, threads))


if __name__ == "__main__":
    main()
