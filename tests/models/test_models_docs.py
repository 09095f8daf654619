"""docs/models.md has the tables of the plugins. `ROLL_UPDATE_GOLDEN=1` writes it."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from roll_modeling.model_table import ON_A_CPU, ROUNDING, model_table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/models/test_models_docs.py -->\n", "<!-- end -->\n"
TRAINER = ("start", "forward", "step", "publish", "export")
COLUMNS = {
    "hf_train": ("roll_strategy_hf", TRAINER),
    "LoRA": ("roll_strategy_hf", ("start", "lora")),
    "fsdp2": ("roll_strategy_fsdp2", (*TRAINER, "lora")),
    "TP": ("roll_strategy_fsdp2", ("start", "tensor_parallel")),
    "CP": ("roll_strategy_fsdp2", ("start", "context_parallel")),
    "deepspeed": ("roll_strategy_deepspeed", (*TRAINER, "lora")),
    "megatron": ("roll_strategy_megatron", (*TRAINER, "lora")),
    "hf_infer": ("roll_infer_hf", ("start", "decode", "publish")),
    "vllm": ("roll_infer_vllm", ("start", "decode", "publish")),
    "sglang": ("roll_infer_sglang", ("start", "decode", "publish")),
}
"""Package and columns of its table that a column of the page sums up."""
CLASS_NAME = re.compile(r"(transformers' )?\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)\b")


class Notes:
    """Numbered reasons. Equal reasons have one number, whatever the class and the type of the model."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def number(self, reason, model_type=""):
        text = CLASS_NAME.sub("the model", reason).replace("<", "&lt;")
        text = re.sub(r" \(\d+ such( tensors)?\)", "", text)
        text = re.sub(r"differs by \S+ from transformers, and", "differs from transformers by more than", text)
        text = re.sub(r"more than rounding explains at most (\S+)", r"more than rounding explains (\1)", text)
        if model_type:
            text = re.sub(rf"(\ba )?(?<![\w.]){re.escape(model_type)}(?![\w.])", "this type", text).replace(
                "architecture this type", "architecture for this type"
            )
        return self.numbers.setdefault(text, len(self.numbers) + 1)

    def lines(self):
        for text, number in self.numbers.items():
            yield from textwrap.wrap(
                f"{number}. {text}", 100, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
            )


def cell(name, row, columns, notes):
    """`✓`, numbers of notes, or `–` if it was not tried."""
    tried = [row[column] for column in columns if column in row]
    if not tried:
        return "–"
    numbers = [notes.number(value, name) for value in tried if isinstance(value, str)]
    numbers += [
        notes.number(f"Logprobs differ by up to {value:g} nats: transformers' decoding differs from its own full pass.")
        for value in tried
        if isinstance(value, float) and value > ROUNDING
    ]
    worked = not any(isinstance(value, str) for value in tried)
    return " ".join([row.get("path", "✓") if worked else "", *map(str, dict.fromkeys(numbers))]).strip()


def table():
    tables = {package: model_table(package) for package, _ in COLUMNS.values()}
    facts, notes = model_table("roll_modeling").models, Notes()
    types = sorted({name for each in tables.values() if each is not None for name in each.models})
    lines = [f"| `model_type` | layout | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in types:
        fact = facts.get(name, {})
        layout = "–" if name not in facts else "padded" if "padded" in fact else "flat"
        if "untrained" in fact:
            layout += f" {notes.number('No gradient: ' + ', '.join(fact['untrained']))}"
        rows = [(tables[package].models if tables[package] else {}).get(name, {}) for package, _ in COLUMNS.values()]
        cells = [cell(name, row, columns, notes) for row, (_, columns) in zip(rows, COLUMNS.values(), strict=True)]
        lines.append(f"| {name} | {layout} | {' | '.join(cells)} |")
    made = [f"`{package}`: {each.versions()}." for package, each in tables.items() if each is not None]
    versions = textwrap.wrap("Versions: " + " ".join(made), 100)
    return "\n".join([*lines, "", "Notes:", "", *notes.lines(), "", *versions, ""])


def test_the_page_has_the_tables_of_the_plugins():
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, after = rest.partition(END)
    expected = f"\n{table()}\n"
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}{expected}{END}{after}", encoding="utf-8")
    else:
        assert found == expected, "run with ROLL_UPDATE_GOLDEN=1 and read the difference"
    assert ON_A_CPU.strip(": ") in before
