"""Where roll-kernels is not installed, torch computes the same results."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("training_and_decoding.py")
NUMBERS = ("logprobs", "entropies", "grad_norm", "logprobs_after", "response_logprobs")


@pytest.mark.slow(ci=True)
def test_results_equal_without_the_package():
    """Numbers up to rounding; greedy tokens and digests exactly."""
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout.splitlines()[-1])
    spec = spec_from_file_location("training_and_decoding", PROGRAM)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    compiled = module.results()
    assert (compiled["has_kernels"], plain["has_kernels"]) == (True, False)
    for name in NUMBERS:
        np.testing.assert_allclose(compiled[name], plain[name], rtol=1e-4, atol=2e-5, err_msg=name)
    assert (compiled["tokens"], compiled["digest"]) == (plain["tokens"], plain["digest"])
