"""vLLM and what it imports warn of their own deprecations, and vLLM leaves a context to the garbage collector."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

import shared_tests

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `vllm_live`


STAND_INS = str(Path(shared_tests.__file__).parents[1] / "stand_ins")
"""Has torchvision, whose wheel is linked to CUDA. vLLM imports names of it for models with images."""
if importlib.util.find_spec("vllm"):  # before transformers finds out whether torchvision is installed
    sys.path.insert(0, STAND_INS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))

SLOW = ("test_adapters_over_a_lower_precision_stay_in_bounds",)
"""Tests of the conformance kit that need an engine of their own. The embedded engine's show it in each run of tests;
here others show that adapters are applied, and that bf16 stays in bounds."""

SECOND_RUNNER = (
    "test_logprobs_have_the_temperature",
    "test_logprobs_ignore_penalties_and_cuts",
    "test_the_top_tokens_of_a_prompt_equal_the_reference",
    "test_output_i_depends_on_the_seed_and_i",
    "test_stop_token_ids_end_a_response",
    "test_min_new_tokens_masks_ends",
    "test_requests_continue_under_new_weights",
    "test_routed_experts_are_those_that_the_model_chooses",
)
"""Tests of the conformance kit that `TestSecondRunner` runs, because V2 could fail them alone; the others are slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            if item.name.startswith(SLOW):
                item.add_marker(pytest.mark.slow)
            if "TestSecondRunner" in item.nodeid and not item.name.startswith(SECOND_RUNNER):
                item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:[Uu]nclosed context:ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def _garbage():
    """Collected while these tests' filters hold."""
    yield
    gc.collect()
