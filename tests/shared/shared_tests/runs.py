"""Runs of ROLL's own pipelines in tests, and their numbers on two ranks of a strategy."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

from roll_testing.runs import REWARDS as DIGITS
from roll_testing.runs import TINY, Runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.runtime.run.loop import RunResult


class PipelineRuns(Runs):
    """Configs of the pipelines of other packages, and configs on several ranks."""

    def __init__(self, folder: Path, executor: str) -> None:
        """Write the pairs `train.pairs.jsonl` and `val.pairs.jsonl` as well."""
        super().__init__(folder, executor)
        for name in ("train", "val"):
            rows = map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
            lines = [json.dumps(_pair(row)) + "\n" for row in rows]
            (folder / f"{name}.pairs.jsonl").write_text("".join(lines), encoding="utf-8")

    def preference(self, pipeline: str = "preference", **keys: Any) -> dict[str, Any]:
        """Config of `preference` or `reward_model`, on pairs of sorted digits and other digits."""
        role = self.sft()["sft_train"]
        role["data_args"] = {"file_name": str(self.folder / "train.pairs.jsonl")}
        role["training_args"] |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
        return (
            self.base(pipeline)
            | {
                "max_steps": 3,
                "eval_steps": 3,
                "reward_train" if pipeline == "reward_model" else "actor_train": role,
                "validation": {"data_args": {"file_name": str(self.folder / "val.pairs.jsonl")}},
            }
            | keys
        )

    def distill(self, **keys: Any) -> dict[str, Any]:
        """Config of `distill`, without unused keys: a teacher with random weights, wider than the student."""
        base = self.rlvr() | {"pipeline": "distill", "exp_name": "distill"}
        del base["rewards"]
        wider = {**TINY, "hidden_size": 48, "initializer_range": 0.3}
        teacher = {
            "model_args": {"dtype": "fp32", "random_init": wider},
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [0],
        }
        config = base | {"teachers": {"main": teacher}} | keys
        samples = config.get("distill_data") == "teacher"
        if samples:
            config["teacher_infer"] = teacher
        if (samples and "kd_support" not in keys) or keys.get("self_teacher") or keys.get("kd_support") == "stored":
            del config["teachers"]
        if config.get("distill_data") in ("dataset", "teacher"):
            del config["actor_infer"]
        return config

    def on_ranks(
        self, config: dict[str, Any], strategy: str, ranks: int, *, replicas: int = 1, **strategy_config: Any
    ) -> dict[str, Any]:
        """The config with the roles that train or score on `ranks` ranks, and as many sequences in a step.

        `strategy` is the beginning of the names: `hf` of `hf_train` and `hf_infer`.
        """
        on_ranks = deepcopy(config) | {"executor": "ray", "num_gpus_per_node": ranks}
        roles = {**on_ranks, **on_ranks.get("teachers", {})}
        for name, role in roles.items():
            if isinstance(role, dict) and "strategy_args" in role and name not in ("actor_infer", "teacher_infer"):
                trains = "training_args" in role
                chosen = f"{strategy}_{'train' if trains else 'infer'}"
                role["strategy_args"] = {"strategy_name": chosen, "strategy_config": strategy_config}
                role["device_mapping"] = list(range(ranks))
                if trains:
                    role["training_args"]["per_device_train_batch_size"] //= replicas
        return on_ranks

    def learnt(self, result: RunResult) -> list[dict[str, float]]:
        """Metrics of training and validation of each step, without learning rate and time."""
        learnt = ("train/", "val/", "actor/", "distillation/")
        return [
            {name: value for name, value in line.items() if name.startswith(learnt) and not name.endswith("/lr")}
            for line in self.metrics(result)
        ]

    def ahead(
        self, strategy: str, ranks: int, *, replicas: int = 1, **strategy_config: Any
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Metrics of `rlvr` with generation one step ahead of training, on the engine's own slot.

        First those of the policy on `ranks` ranks, then those of one rank of `hf_train` on the recorded rollouts.
        """
        (self.folder / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
        config = self.rlvr(exp_name="ahead", async_generation_ratio=1.0, record_rollouts=True)
        config["actor_infer"]["device_mapping"] = [ranks]
        config = self.on_ranks(config, strategy, ranks, replicas=replicas, **strategy_config)
        recorded = self.ok(config | {"num_gpus_per_node": ranks + 1})
        replay = {"async_generation_ratio": 1.0, "replay_rollouts": str(recorded.run_dir.path), "num_gpus_per_node": 2}
        alone = self.rlvr(exp_name="alone", **replay)
        alone["actor_infer"]["device_mapping"] = [1]
        return self.learnt(recorded), self.learnt(self.ok(alone))


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    right = row["response"]
    wrong = right[::-1] if right[::-1] != right else right + "0"
    columns = {name: row[name] for name in ("id", "prompt", "ground_truth")}
    return columns | {"chosen": right, "rejected": wrong, "margin": 0.5}


# -- two ranks ---------------------------------------------------------------------------------------------------------

_REFERENCE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}
_DATASET = {"distill_data": "dataset", "max_steps": 2}
_FULL = _DATASET | {"kd_support": "full", "kd_temperature": 2.0, "kd_objective": "js_divergence"}
_EMA = {"self_teacher": "ema", "ema_decay": 0.5, "nll_coef": 0.1, "kd_support": "teacher_topk", "logits_topk": 4}
_LORA = {"lora_target": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8}

DISTILLATIONS: Mapping[str, Mapping[str, Any]] = {
    "vocabulary": _FULL,
    "lora": _FULL,
    "ema": _DATASET | _EMA,
    "rollouts": {"max_steps": 2, "kd_support": "student_topk", "logits_topk": 4},
}
PREFERENCES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dpo": ("dpo", {"reference": _REFERENCE, "loss_type": ["sigmoid", "sft"]}),
    "kto": ("dpo", {"reference": _REFERENCE, "loss_type": "kto"}),
    "reward_model": ("reward_model", {"margin": "margin"}),
}


def check_distillation(runs: PipelineRuns, name: str, strategy: str, *, replicas: int = 2, **settings: Any) -> None:
    """Fail unless a run of `DISTILLATIONS` has the numbers of one rank of `hf_train`; `settings` of the strategy."""
    config = runs.distill(**DISTILLATIONS[name])
    config["actor_train"]["model_args"] |= _LORA if name == "lora" else {}
    check_two_ranks(runs, config, strategy, replicas=replicas, **settings)


def check_preference(runs: PipelineRuns, name: str, strategy: str, *, replicas: int = 2, **settings: Any) -> None:
    """Fail unless a run of `PREFERENCES` has the numbers of one rank of `hf_train`; `settings` of the strategy."""
    pipeline, keys = PREFERENCES[name]
    check_two_ranks(runs, runs.preference(pipeline, **keys), strategy, replicas=replicas, **settings)


def check_stale_rollouts(runs: PipelineRuns, strategy: str, **settings: Any) -> None:
    """Fail unless off-policy steps on two ranks have the numbers of one rank of `hf_train` on the same rollouts."""
    metrics, expected = runs.ahead(strategy, 2, replicas=2, **settings)
    assert all(line["actor/logprob_lag"] > 0 for line in metrics[1:])
    same_keys = [{name: line[name] for name in other} for line, other in zip(metrics, expected, strict=True)]
    _check_near(same_keys, expected, 3, 1e-3)


def check_two_ranks(
    runs: PipelineRuns, config: dict[str, Any], strategy: str, *, replicas: int = 2, rel: float = 1e-3, **settings: Any
) -> None:
    """Fail unless a config on two ranks has the metrics of one rank of `hf_train`."""
    expected = runs.learnt(runs.ok(config))
    on_ranks = runs.on_ranks(config, strategy, 2, replicas=replicas, **settings)
    _check_near(runs.learnt(runs.ok(on_ranks)), expected, config["max_steps"], rel)


def _check_near(
    metrics: Sequence[dict[str, float]], expected: Sequence[dict[str, float]], num_steps: int, rel: float
) -> None:
    assert len(metrics) == len(expected) >= num_steps
    for line, other in zip(metrics, expected, strict=True):
        assert line == pytest.approx(other, rel=rel, abs=rel / 100)


REWARDS = (
    DIGITS
    + '''
def components(prompt, response, **row):
    digits, odd = sum(c.isdigit() for c in response) / 6, float(len(response) % 2)
    return {"value": digits + odd, "digits": digits, "odd": odd, "answer": response}

def constant(prompt, response, **row):
    return 1.0

def broken(prompt, response, **row):
    raise RuntimeError("the judge is out")

def sometimes(prompt, response, **row):
    if len(response) % 2:
        raise RuntimeError("odd")
    return float(len(response))

def flaky(prompt, response, **row):
    """Fails the first two times that it sees a response."""
    import hashlib, pathlib
    seen = pathlib.Path(__file__).with_name("seen") / hashlib.sha256(f"{prompt}|{response}".encode()).hexdigest()
    seen.parent.mkdir(exist_ok=True)
    times = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("." * (times + 1))
    if times < 2:
        raise RuntimeError("not yet")
    return share_of_digits(prompt, response)

def endless(prompt, response, **row):
    import pathlib, time
    pathlib.Path("judging").touch()
    time.sleep(60)
'''
)
"""Module `rollrewards` of rewards, to be written into the folder of the runs."""
