"""The preference example: its data are pairs of right and wrong digits, and its config is accepted."""

import json
import subprocess
import sys
from pathlib import Path

from roll_core.config import load
from roll_core.plugins.registry import Registry
from shared_tests.hf_plugins import hf_plugins

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "preference"


def test_chosen_responses_are_right_and_rejected_ones_wrong(tmp_path):
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(tmp_path)], check=True)
    for name, count in (("train", 24_000), ("val", 500)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(rows) > 0.99 * count
        for row in rows:
            assert row["chosen"] == "".join(sorted(row["prompt"][:-1]))
            assert row["rejected"] != row["chosen"]
            assert sorted(row["rejected"]) == sorted(row["chosen"])


def test_the_config_is_accepted():
    config = load(EXAMPLE / "dpo.yaml", [], Registry(hf_plugins("roll-pipeline-preference"))).config
    assert config.uses_reference
    assert config.weights == {"sigmoid": 1.0, "sft": 0.2}
