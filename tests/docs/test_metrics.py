"""docs/metrics.md lists every metric. `test_init_command.py` and `test_tutorial.py` compare it with runs, too."""

from __future__ import annotations

import re
from pathlib import Path

from shared_tests.docs import undocumented

PACKAGES = Path(__file__).parents[2] / "packages"
GROUPS = "time|tokens|weight_sync|checkpoint_store|score|groups|reward|baseline|advantage|rollout|kl|correction|val"
NAME = re.compile(rf"\"((?:{GROUPS}|response_length|prompt_length)/[a-z_/]+)\"")


def test_every_metric_that_the_sources_name_is_on_the_page():
    files = [*PACKAGES.glob("roll-core/src/**/*.py"), *PACKAGES.glob("roll-pipeline-*/src/**/*.py")]
    found = {
        name for file in files if file.name != "console.py" for name in NAME.findall(file.read_text(encoding="utf-8"))
    }
    # The console has labels, and names of other packages' metrics.
    assert len(found) > 40
    assert undocumented(found) == []


def test_names_that_the_page_lacks_are_found():
    known = ["actor/lr", "val/score/mean", "time/rollout", "env/guess/turn_1/reward", "val/rewards/chosen"]
    assert undocumented([*known, "actor/made_up", "val/made_up"]) == ["actor/made_up", "val/made_up"]
