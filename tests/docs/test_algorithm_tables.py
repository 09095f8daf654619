"""The tables of algorithms.md, preference.md and distillation.md have every name, with its options and defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from roll_core.builtin.plugin import roll_advantage_estimators, roll_policy_losses
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import Config
from roll_pipeline_agentic.plugin import roll_advantage_estimators as turn_estimators
from roll_pipeline_distill import config as distill
from roll_pipeline_preference.config import LabelledLoss, PolicyLoss, ReferenceLoss

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, header: str) -> dict[str, str]:
    """The rest of each row, by the names in its first cell, of the tables whose first column has this header."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for table in re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|:]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        for line in table.splitlines():
            first, _, rest = line.strip("| ").partition(" | ")
            found |= {name: f"{found.get(name, '')} {rest}" for name in re.findall(r"`([^`]+)`", first)}
    return found


@pytest.mark.parametrize("record", list(roll_policy_losses()), ids=lambda record: record.name)
def test_every_policy_loss_has_a_row_with_its_options(record):
    row = rows("algorithms.md", "`pg_variant`")[record.name]
    defaults = schema_of(record, Config, owner=record.name)().model_dump()
    assert re.search(r"arXiv:\d{4}\.\d{5}|Williams", row)
    written = {key: value for key, value in re.findall(r"`(\w+)(?:: ([^`]+))?`", row) if key in defaults}
    assert written.keys() == defaults.keys() - {"log_ratio_clamp"}
    for key, value in written.items():
        if value:
            assert type(defaults[key])(value) == defaults[key]


def test_every_estimator_has_a_row():
    names = [record.name for record in (*roll_advantage_estimators(), *turn_estimators())]
    assert rows("algorithms.md", "`adv_estimator`").keys() == set(names)


def test_every_preference_loss_has_a_row():
    names = {*get_args(ReferenceLoss), *get_args(PolicyLoss), *get_args(LabelledLoss)}
    assert rows("preference.md", "`loss_type`").keys() == names


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("distill_data", distill.DistillConfig.model_fields["distill_data"].annotation),
        ("kd_support", distill.DistillConfig.model_fields["kd_support"].annotation),
        ("kd_tail", distill.Tail),
        ("kd_placement", distill.DistillConfig.model_fields["kd_placement"].annotation),
    ],
)
def test_the_choices_of_distillation_have_their_values(key, values):
    row = rows("distillation.md", "key")[key]
    names = [each for part in get_args(values) for each in (get_args(part) or (part,)) if isinstance(each, str)]
    assert names
    assert {f"`{name}`" for name in names} <= set(row.replace(",", " ").split())


def test_every_divergence_has_its_formula():
    text = (DOCS / "distillation.md").read_text(encoding="utf-8")
    named = re.findall(r"(?:^- |\. )`(\w+)`:", text, re.MULTILINE)
    assert set(get_args(distill.Divergence)) <= set(named)
