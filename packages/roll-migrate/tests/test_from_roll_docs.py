"""docs/from-roll.md lists every key of the import rules with its result. ROLL_UPDATE_GOLDEN=1 updates it."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from roll_migrate import roll_keys
from roll_migrate.rules import IMPORT_STATUSES, AnyName, KeyRule

DOCS = Path(__file__).parents[3] / "docs" / "from-roll.md"
BEGIN, END = "<!-- keys: made by packages/roll-migrate/tests/test_from_roll_docs.py -->\n", "<!-- end of keys -->"
TITLES = {
    "`rlvr`: the run": roll_keys.RLVR,
    "`agentic`: the run, where it differs": {
        key: rule for key, rule in roll_keys.AGENTIC.items() if roll_keys.RLVR.get(key) is not rule
    },
    "`sft`: the run, where it differs": {
        key: rule for key, rule in roll_keys.SFT.items() if roll_keys.RLVR.get(key) is not rule
    },
    "`dpo`: the run, where it differs": {
        key: rule for key, rule in roll_keys.PREFERENCE.items() if roll_keys.RLVR.get(key) is not rule
    },
    "`distill`: the run, where it differs": {
        key: rule for key, rule in roll_keys.DISTILL.items() if roll_keys.SFT.get(key) is not rule
    },
    "On-policy distillation: the run, where it differs": {
        key: rule for key, rule in roll_keys.ON_POLICY_DISTILL.items() if roll_keys.RLVR.get(key) is not rule
    },
    "Reward-FL: the run, where it differs": {
        key: rule
        for key, rule in roll_keys.REWARD_FLOW.items()
        if roll_keys.RLVR.get(key) is not rule and key != "actor_train"
    },
    "Reward-FL: `model_config_kwargs`": roll_keys.FLOW_MODEL,
    "`actor_train`, `sft_train`, `critic`, `student`": roll_keys.TRAIN,
    "`actor_infer`, where it differs": {
        key: rule for key, rule in roll_keys.INFER.items() if roll_keys.TRAIN.get(key) is not rule
    },
    "`model_args`": roll_keys.MODEL,
    "`training_args`": roll_keys.TRAINING,
    "`data_args`": roll_keys.DATA,
    "`generating_args`": roll_keys.GENERATING,
    "`rewards.<domain>`": roll_keys.REWARD,
    "`validation`": roll_keys.VALIDATION,
    **{f"`strategy_config` of `{name}`": table for name, table in roll_keys.STRATEGIES.items()},
}
ROLES = ("actor_", "sft_", "student", "teacher")
ELSEWHERE = {"model_args", "training_args", "data_args", "generating_args", "strategy_args"}
"""Have tables of their own."""


def rows(table, prefix=""):
    """`(result, keys)`: keys with the same result share an entry."""
    said: dict[str, list[str]] = {}
    for key, rule in table.items():
        if isinstance(rule, AnyName):
            rule, key = rule.rule, f"{key}.<name>"
        if isinstance(rule, KeyRule):
            said.setdefault(rule.says, []).append(prefix + key)
        elif key not in ELSEWHERE and key != "rewards.<name>":
            for says, keys in rows(rule, f"{prefix}{key}."):
                said.setdefault(says, []).extend(keys)
    return list(said.items())


def lists() -> str:
    text = ""
    for title, table in TITLES.items():
        result = {
            key: rule
            for key, rule in table.items()
            if isinstance(rule, (KeyRule, AnyName))
            or (key not in ELSEWHERE and not key.startswith(("actor_", "sft_", "student", "teacher")))
        }
        text += f"### {title}\n\n"
        for says, keys in rows(
            {key: rule for key, rule in result.items() if key not in ("reference", "critic", "validation")}
        ):
            item = f"- {', '.join(f'`{key}`' for key in keys)}: {says}"
            text += textwrap.fill(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            text += "\n"
        text += "\n"
    return text


def test_docs_list_the_rules_of_the_code():
    text = DOCS.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    expected = f"{before}{begin}{lists()}{END}{after}"
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        DOCS.write_text(expected, encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == expected


def test_every_status_is_explained():
    text = DOCS.read_text(encoding="utf-8").partition("## Every key")[0]
    assert re.findall(r"^\| ([a-z ]+) \| \w", text, re.MULTILINE)[1:] == list(IMPORT_STATUSES)
