"""docs/megatron.md lists every key with its type, default and meaning, and each that is refused with the reason."""

from __future__ import annotations

from pathlib import Path

from roll_strategy_megatron.config import REFUSED, MegatronConfig
from roll_testing.config_table import check_table

PAGE = Path(__file__).parents[3] / "docs" / "megatron.md"
BEGIN, END = "<!-- keys: made by packages/roll-strategy-megatron/tests/test_docs.py -->\n", "<!-- end of keys -->"


def test_the_page_has_every_key_as_the_schema_has_it():
    names = {"NonNegativeFloat": "float ≥ 0", "Fraction": "float in (0, 1]"}
    check_table(PAGE, MegatronConfig, BEGIN, END, names)


def test_the_page_says_why_keys_are_refused():
    text = PAGE.read_text(encoding="utf-8")
    for key, reason in REFUSED.items():
        assert any(f"`{key}`" in line and line.rstrip().endswith(f"| {reason} |") for line in text.splitlines()), key
