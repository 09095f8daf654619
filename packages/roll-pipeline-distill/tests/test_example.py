"""The example's configs are accepted, and its two runs differ only in who generates."""

from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.plugins.registry import load_registry

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "distill"


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Loaded in an empty directory: where the demo has run, the teacher's link `latest` leads to its run."""
    registry = load_registry()
    names = ("student", "on_policy", "off_policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        return {name: load(EXAMPLE / f"{name}.yaml", [], registry).config for name in names}


def test_both_runs_learn_from_the_teachers_distribution(configs):
    on_policy, off_policy = configs["on_policy"], configs["off_policy"]
    teacher = "output/quickstart-grpo/latest/export"
    assert on_policy.teachers["main"].model_args.model_name_or_path == teacher
    assert off_policy.teacher_infer.model_args.model_name_or_path == teacher
    assert (on_policy.kd_support, on_policy.objective) == ("full", "reverse_kl")
    assert (off_policy.kd_support, off_policy.objective) == ("full", "forward_kl")
    different = {"exp_name", "distill_data", "teacher_infer"}
    dumps = [each.model_dump() for each in (on_policy, off_policy)]
    assert {key for key in dumps[0] if dumps[0][key] != dumps[1][key]} == different


def test_student_is_smaller_than_the_quick_starts_model(configs):
    student = configs["student"]
    quickstart = load(EXAMPLE.parent / "quickstart" / "sft.yaml", [], load_registry()).config
    small, large = (each.sft_train.model_args.random_init for each in (student, quickstart))
    assert small["hidden_size"] * 2 == large["hidden_size"]
    assert small["num_hidden_layers"] == large["num_hidden_layers"]
    assert student.tokenizer == quickstart.tokenizer
