"""The page that compares runs, and the views by domain and turn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roll_core.cli.main import main
from roll_core.config.dump import flat
from roll_core.errors import RunFileError
from roll_core.runtime.records.record import RunFacts, RunRecord
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.tracking import MetricsFile
from roll_testing.errors import mentions
from roll_tools.comparison import better, config_differences, write_comparison
from roll_tools.domains import by_domain, by_turn
from roll_tools.hub import model_card

ATTACK = "<script>alert(1)</script>"


def make_run(output: Path, values: list[float], config: str) -> RunDir:
    run = RunDir.create(output, "grpo")
    run.config.write_text(config)
    record = RunRecord(run.record, RunFacts(name=run.name, pipeline="rlvr", steps_asked=len(values), seed=1))
    metrics = MetricsFile(run.metrics)
    for step, value in enumerate(values):
        metrics.log(step, {"val/score/mean": value, "actor/loss": 1 - value, f"odd/{ATTACK}": value})
    metrics.close()
    record.finish()
    return run


def blocks(html: str) -> dict[str, dict]:
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', html, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def test_curves_overlay_and_best_values_are_marked(tmp_path):
    one = make_run(tmp_path, [0.1, 0.9, 0.5], "seed: 1\nlr: 0.1\nrole:\n  api_key: hunter2hunter2\n  rank: 8\n")
    two = make_run(tmp_path, [0.2, 0.4, float("nan")], "seed: 1\nlr: 0.2\nrole:\n  rank: 8\n")
    html = write_comparison([one, two], tmp_path / "c.html").read_text()
    curves = blocks(html)["key-curves"]
    assert curves["names"] == ["grpo/001", "grpo/002"]
    score = next(chart for chart in curves["charts"] if chart["title"] == "val/score/mean")
    assert score["lines"] == [[[0, 0.1], [1, 0.9], [2, 0.5]], [[0, 0.2], [1, 0.4]]]
    (row,) = [row for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL) if "val/score/mean" in row]
    assert re.search(r'0\.5</td><td class="num best">0\.9<small>step 1<', row)
    assert re.search(r'NaN</td><td class="num">0\.4<small>step 1<', row)
    assert "hunter2" not in html
    assert ATTACK not in html
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", html)


def test_a_config_diff_has_only_keys_whose_values_differ():
    configs = [
        flat({"lr": 0.1, "a": {"b": 1, "c": [1]}, "on": True}),
        None,
        flat({"lr": 0.2, "a": {"b": 1}, "on": True}),
    ]
    assert config_differences(configs) == [("lr", ["0.1", "", "0.2"]), ("a.c", ["[1]", "", "–"])]


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("val/score/mean", "higher"),
        ("critic/loss", "lower"),
        ("train/loss", "lower"),
        ("kl/mean", "lower"),
        ("reward/retries", "lower"),
        ("actor/loss", ""),
        ("actor/policy_loss", ""),
        ("actor/approx_kl", ""),
        ("score/std", ""),
        ("val/rewards/rejected", ""),
        ("actor/entropy", ""),
        ("time/score", ""),
        ("time/rewards", ""),
        ("kl/coef", ""),
    ],
)
def test_the_better_direction_of_a_metric_is_known_or_empty(name, direction):
    assert better(name) == direction


def test_damaged_and_empty_runs_are_compared_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = make_run(tmp_path, [0.1], "seed: 1\n")
    two = RunDir.create(tmp_path, "grpo")
    two.record.write_text("{")
    two.config.write_text("a: [")
    assert main(["report", str(one.path), str(two.path)]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    html = (tmp_path / "comparison.html").read_text()
    assert mentions(html, "grpo/001", "grpo/002", "unknown")
    assert main(["report", str(one.path), str(one.path), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").is_file()


@pytest.mark.parametrize("config", [b"a: 2024-13-45\n", b"a: \xff\n"])
def test_a_config_that_is_no_yaml_is_named(tmp_path, config):
    run = make_run(tmp_path, [0.1], "seed: 1")
    run.config.write_bytes(config)
    assert write_comparison([run, run], tmp_path / "c.html").is_file()
    assert "library_name: transformers" in model_card(run, "me/model", "transformers")


def test_a_page_in_a_folder_that_does_not_exist_is_a_users_error(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, [0.1], "seed: 1")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run.path), str(run.path), "-o", "none/c.html"]) == RunFileError.exit_code
    assert mentions(capsys.readouterr().err, RunFileError.code, "none/c.html")


def test_metrics_of_domains_and_turns_are_side_by_side():
    metrics = [
        {"step": 1, "time": 1.0, "score/mean": 0.4, "score/math/mean": 0.3, "score/code/mean": 0.5,
         "env/sokoban/turn_1/reward/mean": 0.1, "env/sokoban/turn_2/reward/mean": 0.2, "env/sokoban/score/mean": 1.0},
        {"step": 2, "time": 2.0, "score/math/mean": 0.6},
    ]  # fmt: skip
    domains, turns = by_domain(metrics), by_turn(metrics)
    assert domains is not None
    assert (domains.columns, domains.rows) == (["code", "math"], [("score/<domain>/mean", ["0.5", "0.6"])])
    assert json.loads(domains.charts)["charts"][0]["lines"] == [[[1, 0.5]], [[1, 0.3], [2, 0.6]]]
    assert turns is not None
    assert turns.columns == ["turn 1", "turn 2"]
    assert turns.rows == [("env/sokoban/turn/reward/mean", ["0.1", "0.2"])]
    assert by_domain(metrics[:0]) is None
    assert by_turn([{"step": 1, "env/a/turn_1/x": 1.0}]) is None
