"""docs/megatron.md lists each key that is refused, with the reason."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from roll_strategy_megatron.config import REFUSED

PAGE = Path(__file__).parents[3] / "docs" / "megatron.md"
REFUSED_BEGIN = "<!-- refused: made by packages/roll-strategy-megatron/tests/test_docs.py -->\n"
REFUSED_END = "<!-- end of refused -->"


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
