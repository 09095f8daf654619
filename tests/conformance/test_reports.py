"""The kit's failures are shown, whatever a broken part leaves behind."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from roll_testing.bounds import check_near
from roll_testing.errors import mentions

LEAVES_GARBAGE = """\
import gc
import traceback

from roll_testing.kit import Kit


class ShowsATraceback:
    def __del__(self):
        try:
            raise KeyError(["a"][0] + "b")
        except KeyError as error:
            "".join(traceback.format_exception(error))


class TestBroken(Kit):
    def test_it(self):
        gc.set_threshold(50, 2, 2)  # parsing this file collects
        for _ in range(2000):
            each = ShowsATraceback()
            each.itself = each
        raise AssertionError("the part is broken")


"""


@pytest.mark.parametrize(("found", "factor"), [([1.9, -3.8], True), ([1.9, 3.8], False), ([np.nan, 1.0], False)])
def test_a_constant_factor_is_named(found, factor):
    """As with an optimizer whose first step is not the learning rate times the gradient."""
    with pytest.raises(AssertionError) as raised:
        check_near("gradient", {"w": np.array(found)}, {"w": np.array([1.0, -2.0])}, 1e-5)
    assert mentions(str(raised.value), 1.9, "times") == factor


def test_garbage_that_shows_a_traceback_does_not_hide_a_failure(tmp_path):
    """As tasks do whose exception nobody retrieved. Python 3.11 cannot parse the test's source while it collects it."""
    file = tmp_path / "test_broken.py"
    more = "".join(
        f"def f{i}(a, b):\n    return [a + b * {i} for _ in range(3)] if a else {{1: (a, b)}}\n" for i in range(3000)
    )
    file.write_text(LEAVES_GARBAGE + more, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-c", "/dev/null", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert mentions(done.stdout, "broken")
