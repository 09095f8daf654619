import math
import subprocess
import sys
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from roll_testing.errors import raises_error
from roll_trackers.tensorboard_tracker import TensorBoardTracker


def read(directory: Path) -> list[tuple[int, str, object]]:
    found = []
    for file in directory.iterdir():
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                array = tensor_util.make_ndarray(value.tensor)
                found.append((event.step, value.tag, array.item() if array.size == 1 else array.tolist()))
    return found


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, "x/001", {})
    tracker.log(1, {"loss": 0.5, "größe/mean": 3})
    tracker.log(2, {"loss": 0.25, "score": math.nan})
    tracker.close()
    found = read(tmp_path / "tensorboard")
    assert found[:3] == [(1, "loss", 0.5), (1, "größe/mean", 3.0), (2, "loss", 0.25)]
    assert found[3][:2] == (2, "score")
    assert math.isnan(float(str(found[3][2])))


def test_the_config_is_shown_as_yaml(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, "x/001", {"log_dir": str(tmp_path / "elsewhere")})
    tracker.log_config({"pipeline": "sft", "roles": {"a": [1, 2]}})
    tracker.close()
    [(step, tag, text)] = read(tmp_path / "elsewhere")
    assert (step, tag) == (0, "config")
    assert isinstance(text, bytes)
    assert yaml.safe_load(text.decode()) == {"pipeline": "sft", "roles": {"a": [1, 2]}}


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with raises_error(ValueError, "flush"):
        TensorBoardTracker(tmp_path, "x/001", {"flush": 3})


def test_tensorboard_tracker_needs_neither_torch_nor_tensorflow() -> None:
    code = (
        "import sys, roll_trackers.tensorboard_tracker;"
        "print([m for m in ('torch', 'tensorflow', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
