"""kill -9 while a checkpoint is saved: is the last complete one there, intact, and does the run go on from it?

    ./run bench checkpoint_kill [--tries 60] [--resumed 6] [--seed 0]

Each try is a run (SFT of a small random model, a checkpoint after every step) in a process that is killed some time
after it began to save its second checkpoint. The moments are spread evenly, with jitter, over the time that saving
takes and somewhat beyond: they hit writing, digesting, the rename and the removal of old checkpoints. After each:

* every checkpoint that can be seen verifies, and there is one of the first step at least;
* its files have the digests of the same step of a run that nobody killed;
* a strategy loads it;
* for some of them, the resumed run's model and optimizer at the end equal those of that run bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processes are forked, and threads are not

from common import REPOSITORY, write_result

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

FORK = multiprocessing.get_context("fork")
"""Libraries are imported once, and every try is a fork of this process, which itself computes nothing."""
FORKS_NEED = (
    "hydra",
    "transformers.models.qwen3.modeling_qwen3",
    "roll_strategy_hf.train",
    "roll_core.pipelines.sft",
    "roll_core.runtime.run.loop",
)
STEPS, KILLED_IN = 5, 2
BEYOND = 1.3
"""Kills are spread over so many times the duration of a save."""
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 24_000,  # much to save, little to compute
    "tie_word_embeddings": True,
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
}


def config_file(folder: Path) -> Path:
    """The run's data and config, written into `folder`."""
    rng = random.Random(0)
    rows = [f"{number:03d}" for number in rng.sample(range(1000), 64)]
    lines = (json.dumps({"prompt": f"{digits}>", "response": "".join(sorted(digits))}) + "\n" for digits in rows)
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    config = {
        "pipeline": "sft",
        "executor": "local",
        "max_steps": STEPS,
        "save_steps": 1,
        "max_ckpt_to_keep": 1,
        "eval_steps": 0,
        "export_model": False,
        "track_with": [],
        "prompt_length": 8,
        "response_length": 6,
        "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        "sft_train": {
            "model_args": {"dtype": "fp32", "random_init": MODEL},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def run(config: Path, output: Path, *overrides: str) -> None:
    """A whole run in this process."""
    from roll_core.config import load
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.records.console import Console
    from roll_core.runtime.run.loop import execute

    registry = load_registry()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        loaded = load(config, [f"output_dir={output}", *overrides], registry)
        result = execute(loaded, registry, console=Console(stream=nowhere, terminal=False))
    if result.error is not None:
        raise result.error


def load_state(config: Path, path: Path) -> None:
    """Load a checkpoint into a strategy of its own."""
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.train import TrainingSpec
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy

    tokenizer = path.parent.parent / "tokenizer"
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-3))
    strategy.build(ModelSpec(random_init=MODEL, tokenizer=str(tokenizer), seed=7), MeshInfo(role="check"))
    strategy.load(path / "sft_train" / "rank-0")
    strategy.close()


def forked(function: Any, *arguments: Any) -> BaseProcess:
    """Start the function in a fork."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    return process


def finished(process: BaseProcess) -> None:
    """Wait for a fork that should end well."""
    process.join()
    if process.exitcode:
        raise SystemExit(f"a process ended with {process.exitcode}; see its traceback above")


def wait_for_save(checkpoints: Path, step: int, process: BaseProcess) -> float:
    """The time when the working directory of that step's checkpoint appeared."""
    while True:
        if checkpoints.is_dir() and any(each.name.startswith(f".step-{step}.tmp") for each in checkpoints.iterdir()):
            return time.monotonic()
        if not process.is_alive():
            raise SystemExit("the run ended before it saved; see its traceback above")
        time.sleep(0.0005)


def duration_of_save(config: Path, folder: Path) -> float:
    """Seconds from the first file of a checkpoint until it and the removal of an old one are done."""
    process = forked(run, config, folder)
    checkpoints = folder / "roll" / "001" / "checkpoints"
    began = wait_for_save(checkpoints, KILLED_IN, process)
    while [each.name for each in checkpoints.iterdir()] != [f"step-{KILLED_IN}"]:
        if not process.is_alive():
            raise SystemExit("the end of the save was not seen")
        time.sleep(0.0005)
    lasted = time.monotonic() - began
    finished(process)
    return lasted


def phase(checkpoints: Path) -> str:
    """What the killed process was doing, told by what it left."""
    names = [each.name for each in checkpoints.iterdir()]
    drafts = [each for each in checkpoints.iterdir() if each.name.startswith(f".step-{KILLED_IN}.tmp")]
    if drafts:
        if (drafts[0] / "manifest.json").exists():
            return "manifest written, not yet renamed"
        done = (drafts[0] / "sft_train" / "rank-0" / "state.json").exists()
        return "flushing and digesting" if done else "strategy writing its files"
    if f"step-{KILLED_IN}" not in names:
        return "outside the save"
    return "removing the oldest" if any(name.startswith(".step-") for name in names) else "after the save"


def digests(checkpoint: Path) -> dict[str, str]:
    """Of the files; not of the random state, which belongs to the process, and without the run's directory."""
    from roll_core.runtime.records.manifest import read_manifest

    files = read_manifest(checkpoint).files
    found = {name: entry["sha256"] for name, entry in files.items() if not name.endswith("random.safetensors")}
    state = (checkpoint / "state.json").read_text(encoding="utf-8").replace(str(checkpoint.parent.parent), "")
    return found | {"state.json": hashlib.sha256(state.encode()).hexdigest()}


def killed(config: Path, folder: Path, delay_s: float) -> Path:
    """A run, killed so long after it began to save. Returns where its checkpoints are."""
    process = forked(run, config, folder)
    checkpoints = folder / "roll" / "001" / "checkpoints"
    began = wait_for_save(checkpoints, KILLED_IN, process)
    time.sleep(max(0.0, began + delay_s - time.monotonic()))
    process.kill()
    process.join()
    return checkpoints


def check(checkpoints: Path, config: Path, reference: dict[int, dict[str, str]]) -> int:
    """Everything that must hold after a kill. Returns the step from which the run can go on."""
    from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
    from roll_core.runtime.records.manifest import verify

    store = CheckpointDirectory(checkpoints)
    for each in store.list():
        if problems := verify(each.path):
            raise SystemExit(f"{each.path} can be seen and is damaged: {problems}")
    latest = store.latest_good()
    if latest is None or latest.step < KILLED_IN - 1:
        raise SystemExit(f"the checkpoint of step {KILLED_IN - 1} is gone: {latest}")
    if digests(latest.path) != reference[latest.step]:
        raise SystemExit(f"{latest.path} differs from that of the run that was not killed")
    finished(forked(load_state, config, latest.path))
    store.sweep()
    if left := [each.name for each in checkpoints.iterdir() if each.name.startswith(".")]:
        raise SystemExit(f"left over after a sweep: {left}")
    return latest.step


def whole_run(config: Path, folder: Path) -> dict[int, dict[str, str]]:
    """Digests of every step's checkpoint of a run that nobody kills."""
    finished(forked(run, config, folder, "max_ckpt_to_keep=0"))
    checkpoints = folder / "roll" / "001" / "checkpoints"
    return {step: digests(checkpoints / f"step-{step}") for step in range(1, STEPS + 1)}


def main() -> None:
    """Kill, check, count, and write benchmarks/results/checkpoint_kill.*."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--resumed", type=int, default=6, help="so many of them are resumed to their end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in FORKS_NEED:
        importlib.import_module(name)

    rng = random.Random(options.seed)
    phases: Counter[str] = Counter()
    steps: Counter[int] = Counter()
    resumed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = config_file(folder)
        reference = whole_run(config, folder / "whole")
        saves = [duration_of_save(config, folder / f"timed-{number}") for number in range(3)]
        size = sum(each.stat().st_size for each in (folder / "whole/roll/001/checkpoints/step-1").rglob("*"))
        window_s = statistics.median(saves) * BEYOND
        for number in range(options.tries):
            place = folder / f"try-{number}"
            checkpoints = killed(config, place, window_s * (number + rng.random()) / options.tries)
            phases[phase(checkpoints)] += 1
            step = check(checkpoints, config, reference)
            steps[step] += 1
            # On a busy machine a kill can come so late that nothing is left to do.
            if step < STEPS and resumed * options.tries <= number * options.resumed and resumed < options.resumed:
                finished(forked(run, config, place, "resume_from_checkpoint=true"))
                if digests(place / "roll" / "002" / "checkpoints" / f"step-{STEPS}") != reference[STEPS]:
                    raise SystemExit(f"try {number}: the resumed run ended elsewhere than the one that was not killed")
                resumed += 1
            sys.stderr.write(f"{number + 1}/{options.tries} {dict(phases)}\n")
            _remove(place)
    rows = [f"| {name} | {count} |" for name, count in phases.most_common()]
    table = (
        f"{options.tries} runs killed with SIGKILL within {window_s:.2f} s of the beginning of a save, which took"
        f" {statistics.median(saves):.2f} s for {size / 2**20:.0f} MiB. The last complete checkpoint was there, intact"
        f" and loadable {options.tries} times, and equal to that of a run that was not killed; {resumed} of the runs"
        " were resumed and ended with the same weights and moments, bit for bit.\n\n"
        + "\n".join(["| killed while | times |", "|---|--:|", *rows])
    )
    print(table)
    path = write_result(
        "checkpoint_kill",
        {
            "tries": options.tries,
            "intact": options.tries,
            "resumed_bit_for_bit": resumed,
            "save_s": [round(each, 3) for each in saves],
            "window_s": round(window_s, 3),
            "state_bytes": size,
            "killed_while": dict(phases),
            "goes_on_from_step": {str(step): count for step, count in sorted(steps.items())},
            "seed": options.seed,
        },
        table,
    )
    print(f"written to {path.relative_to(REPOSITORY)}")


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
