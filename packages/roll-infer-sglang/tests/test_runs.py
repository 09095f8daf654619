"""The quick start, shortened, with the engine's name changed and where the roles sit: as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_on_a_cpu import ON_A_CPU, need_image_processors

from shared_tests.engine_runs import ImageRunTests
from shared_tests.quickstart import QuickStartTests


@pytest.mark.engine("sglang")
@pytest.mark.slow  # CI has the whole run of test_agent_runs.py
@pytest.mark.timeout(900)  # a server takes 30 s of CPU time to start
class TestQuickStart(QuickStartTests):
    engine = "sglang"
    settings = ON_A_CPU | {"max_total_tokens": 16384, "max_running_requests": 512}
    repository = Path(__file__).parents[3]


@pytest.mark.engine("sglang")
@pytest.mark.slow  # CI compares logprobs after images, without a run
@pytest.mark.timeout(900)
class TestImageRun(ImageRunTests):
    engine = "sglang"
    settings = ON_A_CPU

    @pytest.fixture(autouse=True)
    def _image_processors(self):
        need_image_processors()
