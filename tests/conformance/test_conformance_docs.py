"""docs/conformance.md has every test, every attribute and the bounds, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_testing import (
    EnvironmentConformance,
    EnvironmentIntegrity,
    ExecutorConformance,
    InferStrategyConformance,
    PlatformConformance,
    TrainStrategyConformance,
    WeightTransportConformance,
)
from roll_testing.bounds import BOUNDS, SPLIT
from roll_testing.infer.kit import InferKit
from roll_testing.integrity import TRICKS
from roll_testing.kit import Kit
from roll_testing.train_kit import TrainKit

TEXT = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
STRATEGIES, _, REST = TEXT.partition("\n## Is my infer strategy right?\n")
ENGINES, _, REST = REST.partition("\n## Is my platform right?\n")
PLATFORMS, _, REST = REST.partition("\n## Is my weight transport right?\n")
TRANSPORTS, _, REST = REST.partition("\n## Is my executor right?\n")
EXECUTORS, _, REST = REST.partition("\n## Is my environment right?\n")
ENVIRONMENTS, _, REST = REST.partition("\n## Can my environment be tricked?\n")
TRICKED, _, _ = REST.partition("\n## Are my smaller parts right?\n")
KITS = [
    (STRATEGIES, TrainStrategyConformance),
    (ENGINES, InferStrategyConformance),
    (PLATFORMS, PlatformConformance),
    (TRANSPORTS, WeightTransportConformance),
    (EXECUTORS, ExecutorConformance),
    (ENVIRONMENTS, EnvironmentConformance),
    (TRICKED, EnvironmentIntegrity),
]
INTERNAL = {"provider", "can", "pytest_generate_tests", "models", "case", "need", "need_training", "setup", "oracle"}
INTERNAL |= {"run", "scored", "trained", "reference", "batch", "sizes", "dtypes", "platform_here", "engine", "fresh"}
INTERNAL |= {"need_exact", "oracle_of", "stored", "prompt", "bound", "published", "generate_or_skip", "seed"}
INTERNAL |= {"check_logprobs", "check_greedy", "check_outputs", "need_trainer", "engine_of", "doomed"}
PUBLIC = [
    (text, name)
    for text, subject in ((STRATEGIES, TrainKit), (ENGINES, InferKit))
    for name in sorted({*vars(Kit), *vars(subject)} - INTERNAL)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("text", "kit"), KITS)
def test_every_test_has_its_line_and_no_other(text, kit):
    tests = sorted(name for name in dir(kit) if name.startswith("test_"))
    assert sorted(re.findall(r"^- `(test_\w+)`: \S", text, flags=re.MULTILINE)) == tests


@pytest.mark.parametrize(("text", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_every_author_option_is_explained(text, name):
    assert re.search(rf"^- `{name}(\([\w, ]*\))?`: \S", text, flags=re.MULTILINE)


def test_the_bounds_are_those_of_the_code():
    def row(*values):
        return "| " + " | ".join(f"{value:g}".replace("0.0001", "1e-4").replace("e-0", "e-") for value in values) + " |"

    each = [BOUNDS[dtype] for dtype in ("fp32", "bf16", "fp16")]
    for values in ([b.outputs for b in each], [b.gradient for b in each], [b.steps for b in each]):
        assert row(*values) in TEXT
    assert f"different ways, distance {row(SPLIT)}" in TEXT


@pytest.mark.parametrize(("text", "kit"), KITS)
def test_the_example_is_a_class_of_tests(text, kit):
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    names: dict[str, object] = {}
    exec(code, names)  # our own page
    assert issubclass(names["TestMine"], kit)


def test_every_trick_has_a_row_and_no_other():
    assert re.findall(r"^\| ([a-z ]+) \|", TRICKED, flags=re.MULTILINE)[1:] == [trick.name for trick in TRICKS]
