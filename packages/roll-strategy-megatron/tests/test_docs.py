"""docs/megatron.md lists every key with its type, default and meaning, and each that is refused with the reason."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from roll_strategy_megatron.config import REFUSED, MegatronConfig
from shared_tests.config_table import check_table

PAGE = Path(__file__).parents[3] / "docs" / "megatron.md"
BEGIN, END = "<!-- keys: made by packages/roll-strategy-megatron/tests/test_docs.py -->\n", "<!-- end of keys -->"
REFUSED_BEGIN = "<!-- refused: made by packages/roll-strategy-megatron/tests/test_docs.py -->\n"
REFUSED_END = "<!-- end of refused -->"


def test_the_page_has_every_key_as_the_schema_has_it():
    names = {"NonNegativeFloat": "float ≥ 0", "Fraction": "float in (0, 1]"}
    check_table(PAGE, MegatronConfig, BEGIN, END, names)


def test_the_page_says_why_keys_are_refused():
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(REFUSED_BEGIN)
    keys_by_reason: dict[str, list[str]] = {}
    for key, reason in REFUSED.items():
        keys_by_reason.setdefault(reason, []).append(f"`{key}`")
    items = "".join(
        textwrap.fill(f"- {', '.join(keys)}: {reason}", 100, subsequent_indent="  ", break_on_hyphens=False) + "\n"
        for reason, keys in keys_by_reason.items()
    )
    wanted = f"{before}{begin}{items}{REFUSED_END}{rest.partition(REFUSED_END)[2]}"
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted
