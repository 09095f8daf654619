"""Conformance kits on simulated devices, each in a process of its own. CI runs a selection of the trainers' kits."""

from __future__ import annotations

import re

import pytest

from shared_tests.simulated import REPOSITORY, npu_host, run

KITS = REPOSITORY / "tools" / "gpu" / "kits.py"
PYTEST = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider")
CHECKPOINTS = (
    "test_logprobs_equal_the_reference",
    "test_steps_of_adamw_equal_the_reference",
    "test_gradients_are_clipped_to_their_global_norm",
    "test_a_resumed_run_equals_an_uninterrupted_one",
    "test_exported_weights_are_those_that_compute",
    "test_offload_frees_memory",
)
DTYPES = (
    "test_outputs_in_lower_precision_stay_in_bounds",
    "test_the_gradient_in_lower_precision_stays_in_bounds",
    "test_masters_keep_what_lower_precision_rounds_away",
)
OTHERS = (
    "test_offload_and_onload_change_no_number",
    "test_adapters_are_merged_on_export",
    "test_training_by_programs_resumes",
    "test_a_receiver_gets_the_published_weights",
)


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("kit", "tests", "number"),
    [
        pytest.param("TestHFInferTorch", (), 77, id="hf_infer"),
        pytest.param("TestHFTrain", CHECKPOINTS + DTYPES + OTHERS, 40, id="hf_train"),
        pytest.param("TestFSDP2", CHECKPOINTS + DTYPES[:1], 17, id="fsdp2_train"),
    ],
)
def test_a_kit_passes(kit, tests, number):
    """A test with two ranks is skipped on fewer devices, so that fewer than `number` pass."""
    assert num_passed(kit, tests) >= number


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kit", ["TestHFTrain", "TestFSDP2"])
def test_a_whole_kit_passes(kit):
    """Two devices are too few for the test that requires a variant of each declared kind of parallelism."""
    assert num_passed(kit, ("not test_declared_parallelism_is_tested",)) >= 155


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_kit_of_fsdp2_passes_on_npus(tmp_path):
    tests = ("logprobs_equal", "steps_of_adamw", "resumed_run_equals", "offload_frees", "outputs_in_lower_precision")
    assert num_passed("TestFSDP2", tests, "npu", **npu_host(tmp_path)) >= 13


@pytest.mark.slow(ci=True)
def test_a_kit_finds_an_engine_that_keeps_memory_reserved():
    test = f"{KITS}::TestHFInferTorch", "-k", "test_sleeping_frees_memory"
    with pytest.raises(AssertionError) as found:
        run(*PYTEST, "-p", "keeps_memory", *test, folder=REPOSITORY, ROLL_GPU_PLATFORM="sim")
    assert counts(str(found.value)) == {"failed": 1}


def num_passed(kit: str, tests: tuple[str, ...] = (), platform: str = "sim", **host: str) -> int:
    """Number of tests of the kit that passed; fails if one failed."""
    select = " or ".join(tests)
    output = run(*PYTEST, f"{KITS}::{kit}", "-k", select, folder=REPOSITORY, ROLL_GPU_PLATFORM=platform, **host)
    return counts(output)["passed"]


def counts(output: str) -> dict[str, int]:
    """Numbers of tests by outcome."""
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped)", output)}
