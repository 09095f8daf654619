"""`./run demo` as a user stops it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "quickstart" / "demo.py"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends signals to a process group")
def test_control_c_ends_the_demo_as_it_ends_a_run(tmp_path):
    words = [sys.executable, str(DEMO), f"output_dir={tmp_path}", "max_steps=100000", "eval_steps=0"]
    demo = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    run = tmp_path / "quickstart-sft" / "latest"
    while demo.poll() is None and not (run / "metrics.jsonl").is_file():
        time.sleep(0.05)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert "Traceback" not in output
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["outcome"] == "interrupted"
    assert (run / "report.html").is_file()
