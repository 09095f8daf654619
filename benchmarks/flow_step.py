"""One step of Flow-GRPO beside a plain loop of torch and diffusers on the same model; memory of truncated ReFL.

    ./run bench flow_step [--steps N] [--rounds N]

An SD3 transformer of 6 × 256 with random weights on latents of 16 × 16, without a VAE. A step samples 4 prompts × 8
images by 10 steps, scores them by their mean, and trains on a window of 3 steps, fp32. Ours is `roll-core run`; the
plain loop does the same arithmetic without seeds per row, checks, metrics, report or failures. Aim: at most its CPU
time.

Memory: what the process of `refl` grows by from its first step on, with gradients through 1 and through all 10 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_result
from trl_steps import run_config, run_peer, stages

MODEL = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "joint_attention_dim": 64,
    "caption_projection_dim": 256,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 16,
}
PROMPTS, IMAGES, STEPS, WINDOW, TOKENS = 4, 8, 10, (1, 2, 3), 8
NOISE, CLIP, LEARNING_RATE = 0.7, 1e-4, 1e-4


def config_of(folder: Path, steps: int, **given: Any) -> dict[str, Any]:
    """Keys of our run."""
    rows = "".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(PROMPTS))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    return {
        "pipeline": "reward_flow",
        "output_dir": str(folder / "output"),
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "track_with": [],
        "export_model": False,
        "height": 16,
        "width": 16,
        "prompt_encoder": "words",
        "prompt_tokens": TOKENS,
        "num_inference_steps": STEPS,
        "rollout_batch_size": PROMPTS,
        "num_images_per_prompt": IMAGES,
        "rewards": {"bright": {"reward": "image_brightness"}},
        "actor_train": {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True, "random_init": MODEL},
            "training_args": {"learning_rate": LEARNING_RATE, "per_device_train_batch_size": PROMPTS * IMAGES},
            "infer_batch_size": PROMPTS * IMAGES,
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
    } | given


def ours(steps: int) -> dict[str, Any]:
    """Seconds of each step of a run in this process, and its stages."""
    grpo = {
        "objective": "flow_grpo",
        "objective_options": {"clip": CLIP},
        "window": "random",
        "window_options": {"size": len(WINDOW), "step_range": [WINDOW[0], WINDOW[-1] + 1]},
        "sampler_options": {"noise_level": NOISE},
    }
    with tempfile.TemporaryDirectory() as name:
        return run_config(Path(name), config_of(Path(name), steps, **grpo))[0]


def plain(steps: int) -> dict[str, Any]:
    """Seconds of each step but the first of a loop of torch and diffusers."""
    import torch
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(**{key: each for key, each in MODEL.items() if key != "_class_name"})
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    text, pooled = torch.randn(PROMPTS, TOKENS, 64), torch.randn(PROMPTS, 64)
    text, pooled = text.repeat_interleave(IMAGES, 0), pooled.repeat_interleave(IMAGES, 0)
    sigmas = torch.linspace(1, 0, STEPS + 1)

    def velocity(x: torch.Tensor, at: int) -> torch.Tensor:
        time_B = sigmas[at].expand(len(x)) * 1000
        return model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=time_B, return_dict=False)[0]

    def transition(x: torch.Tensor, at: int) -> tuple[torch.Tensor, float]:
        sigma, dt = sigmas[at].item(), (sigmas[at + 1] - sigmas[at]).item()
        square = NOISE**2 * sigma / (1 - sigma)
        half = square / (2 * sigma)
        mean = x * (1 + half * dt) + velocity(x, at) * (1 + half * (1 - sigma)) * dt
        return mean, math.sqrt(-square * dt)

    def logprob(y: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
        return (-((y - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean((1, 2, 3))

    found: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
    for _ in range(steps):
        begin = time.process_time(), time.perf_counter()
        with torch.no_grad():
            x, kept = torch.randn(PROMPTS * IMAGES, 3, 16, 16), []
            for at in range(STEPS):
                if at in WINDOW:
                    mean, std = transition(x, at)
                    y = mean + std * torch.randn_like(x)
                    kept.append((at, x, y, logprob(y, mean, std)))
                    x = y
                else:
                    x = x + velocity(x, at) * (sigmas[at + 1] - sigmas[at])
            rewards = x.clamp(-1, 1).mean((1, 2, 3)).view(PROMPTS, IMAGES)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).flatten()
        for at, x, y, old in kept:
            ratio = (logprob(y, *transition(x, at)) - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            (torch.maximum(-advantages * ratio, -advantages * clipped).mean() / len(kept)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["cpu_s"].append(time.process_time() - begin[0])
        found["wall_s"].append(time.perf_counter() - begin[1])
    return {key: each[1:] for key, each in found.items()}


def memory(grad_steps: int) -> dict[str, Any]:
    """MiB by which this process grows over two steps of `refl`, beyond a process that did none."""
    options = {"objective": "refl", "objective_options": {"grad_steps": grad_steps}}
    with tempfile.TemporaryDirectory() as name:
        run_config(Path(name), config_of(Path(name), 2, **options))
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--as", dest="contestant", choices=("ours", "plain", "memory"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        print(json.dumps({"ours": ours, "plain": plain, "memory": memory}[arguments.contestant](arguments.steps)))
        return

    def measured(contestant: str, number: int) -> dict[str, Any]:
        return run_peer([sys.executable, "flow_step.py", "--as", contestant, "--steps", str(number)])

    found = {"plain": [], "ours": []}
    for _ in range(arguments.rounds):
        for who in found:
            found[who].append(measured(who, arguments.steps))
    medians = {
        who: {key: statistics.median(value for each in rounds for value in each[key]) for key in ("cpu_s", "wall_s")}
        for who, rounds in found.items()
    }
    ratio = medians["plain"]["cpu_s"] / medians["ours"]["cpu_s"]
    peaks = {number: measured("memory", number)["peak_mib"] for number in (1, STEPS)}
    lines = ["Seconds of one step, medians.", "", "| | CPU s | wall s |", "|---|--:|--:|"]
    lines += [f"| {who} | {each['cpu_s']:.2f} | {each['wall_s']:.2f} |" for who, each in medians.items()]
    lines += [
        "",
        f"* {ratio:.2f} × the plain loop by CPU time; the aim of 1 is {'met' if ratio >= 1 else 'missed'}.",
        f"* A step by the clock: {stages(found['ours'][-1]['stages'])}.",
        f"* Peak of a process of `refl`: {peaks[1]:.0f} MiB with gradients through 1 step, {peaks[STEPS]:.0f} MiB"
        f" through {STEPS}.",
    ]
    result = {"summary": medians, "cpu_ratio": ratio, "refl_peak_mib": peaks, "rounds": found}
    write_result("flow_step", result, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
