"""Runs in a notebook's kernel: the notebooks of examples/, live metrics, and an interrupted cell."""

import json
import re
import shutil
import sys
import time
from pathlib import Path
from queue import Empty

import pytest
import yaml

from roll_core.runtime.records.record import read_record
from roll_testing.runs import Runs

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {"first_run": "sft_steps, grpo_steps = 2, 1", "own_reward": "steps = 1"}
"""Parameters of a short run, by notebook."""

pytestmark = [
    pytest.mark.engine("nbclient"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # of jupyter_client
]


def text_of(outputs):
    return "".join(each["text"] for each in outputs if each["output_type"] == "stream")


def tables(outputs):
    return [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]


def test_notebooks_have_no_outputs_and_name_their_parameters():
    notebooks = {each.stem: json.loads(each.read_text()) for each in (EXAMPLES / "notebooks").glob("*.ipynb")}
    assert set(notebooks) == set(SHORT)
    for notebook in notebooks.values():
        code = [each for each in notebook["cells"] if each["cell_type"] == "code"]
        assert not [each for each in code if each["outputs"] or each["execution_count"]]
        assert sum("parameters" in each["metadata"].get("tags", ()) for each in code) == 1


class Kernel:
    """A kernel of a notebook. `execute` collects the outputs of a cell as a front end does."""

    def __init__(self, folder):
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def execute(self, code, *, interrupt_at=None, timeout=120):
        """Outputs and error of the cell. `interrupt_at` is a text of the output at which the user presses stop."""
        request = self.client.execute(code)
        outputs, error, updates, end = [], None, 0, time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return outputs, error, updates
            if kind == "error":
                error = content["ename"]
            elif kind == "update_display_data":
                updates += 1
                (shown,) = [each for each in outputs if each.get("id") == content["transient"]["display_id"]]
                shown["data"] = content["data"]
            elif kind in ("stream", "display_data"):
                shown = {"output_type": kind, "id": content.get("transient", {}).get("display_id")}
                outputs.append(shown | {key: content[key] for key in ("text", "data") if key in content})
            if interrupt_at is not None and interrupt_at in text_of(outputs):
                interrupt_at = None
                self.manager.interrupt_kernel()
        raise TimeoutError(text_of(outputs))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One kernel for the module: its first cell that trains imports torch for all."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(folder / name.lower()))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        started = Kernel(folder)
        yield started
        started.close()


@pytest.fixture
def kernel(running, tmp_path):
    """The kernel without names of other tests, in a directory of its own."""
    _, error, _ = running.execute(f"%reset -f\n%cd -q {tmp_path}\nimport sys; sys.path[:] = {sys.path!r}")
    assert error is None
    return running


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("name", SHORT)
def test_a_notebook_runs_from_its_first_to_its_last_cell(name, tmp_path, kernel):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("data", "__pycache__"))
    data = tmp_path / "examples" / "quickstart" / "make_data.py"
    data.write_text(
        data.read_text().replace("NUM_VALIDATION, DIGITS = 24_000, 500", "NUM_VALIDATION, DIGITS = 600, 20")
    )
    folder = tmp_path / "examples" / "notebooks"
    kernel.execute(f"%cd -q {folder}")
    printed, shown = [], []
    for cell in json.loads((folder / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            parameters = "parameters" in cell["metadata"].get("tags", ())
            outputs, error, _ = kernel.execute(SHORT[name] if parameters else "".join(cell["source"]))
            assert error is None, cell
            printed.append(text_of(outputs))
            shown += tables(outputs)
    assert len(shown) == 2
    assert all("finished" in each and "val/score/mean" in each for each in shown)
    assert printed[-1].count("finished") == 2
    assert "Error" not in "".join(printed)
    if name == "own_reward":
        assert (folder / "comparison.html").is_file()


def test_a_cell_shows_live_metrics_and_stop_ends_the_run_safely(tmp_path, kernel):
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(Runs(tmp_path, "local").sft(max_steps=2)))
    run = "import roll_core as roll\nroll.run('sft.yaml', {}, callbacks=[roll.LiveMetrics({})]).outcome"
    outputs, error, updates = kernel.execute(run.format([], []))
    assert error is None
    (table,) = tables(outputs)
    assert "sft/001 · finished · step 2" in table
    assert re.findall(r"<td[^>]*>(train/loss)</td>", table) == ["train/loss"]
    assert updates >= 2
    plain = text_of(outputs)
    assert re.findall(r"^step=(\d)/2 loss=", plain, re.MULTILINE) == ["1", "2"]
    assert "\x1b" not in plain
    assert len(tables(outputs)) == 1  # rich prints to the stream, not as HTML

    interrupted = run.format(["max_steps=4000", "save_steps=1"], ["train/loss"])
    outputs, error, _ = kernel.execute(interrupted, interrupt_at="step=2/4000")
    assert error == "RunInterruptedError"
    assert "sft/002 · interrupted" in tables(outputs)[0]
    record = read_record(tmp_path / "output" / "sft" / "002" / "run.json")
    assert record["outcome"] == "interrupted"
    steps = record["steps_done"] + 1

    resumed = run.format([f"max_steps={steps}", "save_steps=1", "resume_from_checkpoint=true"], [])
    outputs, error, _ = kernel.execute(resumed)
    assert error is None
    assert "sft/003 · finished" in tables(outputs)[0]
    assert read_record(tmp_path / "output" / "sft" / "003" / "run.json")["steps_done"] == steps


def test_without_a_notebook_live_metrics_are_lines(tmp_path, monkeypatch, capsys):
    import roll_core as roll

    monkeypatch.chdir(tmp_path)
    config = Runs(tmp_path, "local").sft(max_steps=2)
    history = roll.run(config, callbacks=[roll.LiveMetrics(["train/loss", "absent"])]).history
    lines = re.findall(r"^sft/001 step=(\d) train/loss=(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [(int(step), float(loss)) for step, loss in lines] == [
        (each["step"], pytest.approx(each["train/loss"], rel=1e-5)) for each in history
    ]
