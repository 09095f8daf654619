"""docs/fsdp2.md lists every key with its type, default and meaning, as the schema has them."""

from __future__ import annotations

from pathlib import Path

from roll_strategy_fsdp2.config import FSDP2Config
from shared_tests.config_table import check_table

PAGE = Path(__file__).parents[3] / "docs" / "fsdp2.md"
BEGIN, END = "<!-- keys: made by packages/roll-strategy-fsdp2/tests/test_docs.py -->\n", "<!-- end of keys -->"


def test_the_page_has_every_key_as_the_schema_has_it():
    check_table(PAGE, FSDP2Config, BEGIN, END, {"DType": "fp32 | bf16"})
