"""kill -9 at any moment of a save: the last complete checkpoint is there and intact. `benchmarks/checkpoint_kill.py`
does the same to whole runs, more often."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.manifest import verify

SAVER = """
import sys
from pathlib import Path
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory

store = CheckpointDirectory(Path(sys.argv[1]), keep=2)
for step in range(1, 1_000_000):
    with store.writing(step, {"order": step}) as path:
        for part in range(3):
            (path / f"part-{part}").write_bytes(step.to_bytes(4, "big") * 500_000)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_complete_checkpoints_survive_a_kill_during_a_save(tmp_path: Path, seed: int) -> None:
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert saver.stdout is not None
    told = [saver.stdout.readline() for _ in range(3)]
    # A save takes some hundredths of a second; the kill falls into one of the next few.
    time.sleep(random.Random(seed).uniform(0, 0.3))
    saver.kill()
    told += saver.communicate()[0].splitlines()
    done = max(int(line) for line in told if line.strip())

    store = CheckpointDirectory(tmp_path)
    latest = store.latest_good()
    assert latest is not None
    # The one that was being announced may be there already.
    assert latest.step in (done, done + 1)
    assert json.loads((latest.path / "state.json").read_text()) == {"order": latest.step}
    for each in store.list():
        assert verify(each.path) == []
        for part in range(3):
            assert (each.path / f"part-{part}").read_bytes() == each.step.to_bytes(4, "big") * 500_000
    store.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{each.step}" for each in store.list()}
