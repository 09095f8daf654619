"""Runs in a notebook's kernel: the notebooks of examples/, live metrics, and an interrupted cell."""

import json
import re
import shutil
import time
from pathlib import Path
from queue import Empty

import pytest
import yaml

from roll_core.runtime.records.record import read_record
from roll_core.runtime.records.run_dir import RunDir
from roll_testing.runs import Runs

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {"first_run": "sft_steps, grpo_steps = 3, 2", "own_reward": "steps = 2"}
"""Parameters of a short run, by notebook."""

pytestmark = [
    pytest.mark.engine("nbclient"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # of jupyter_client
]


@pytest.fixture(autouse=True)
def quiet_jupyter(tmp_path, monkeypatch):
    """Jupyter and IPython keep their files here."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")


def text_of(outputs):
    return "".join(each["text"] for each in outputs if each["output_type"] == "stream")


def tables(outputs):
    return [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]


def test_notebooks_are_committed_without_outputs_and_name_their_parameters():
    notebooks = {each.stem: json.loads(each.read_text()) for each in (EXAMPLES / "notebooks").glob("*.ipynb")}
    assert set(notebooks) == set(SHORT)
    for notebook in notebooks.values():
        code = [each for each in notebook["cells"] if each["cell_type"] == "code"]
        assert not [each for each in code if each["outputs"] or each["execution_count"]]
        assert sum("parameters" in each["metadata"].get("tags", ()) for each in code) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_notebook_runs_from_its_first_to_its_last_cell(name, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("data", "__pycache__"))
    folder = tmp_path / "examples" / "notebooks"
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    (parameters,) = [each for each in notebook.cells if "parameters" in each.metadata.get("tags", ())]
    changed = parameters.source.splitlines()
    changed[-1] = SHORT[name]
    parameters.source = "\n".join(changed)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    code = [each for each in notebook.cells if each.cell_type == "code"]
    shown = [table for each in code for table in tables(each.outputs)]
    assert len(shown) == 2
    assert all("finished" in each and "val/score/mean" in each for each in shown)
    assert text_of(code[-1].outputs).count("finished") == 2
    assert "Error" not in "".join(text_of(each.outputs) for each in code)
    if name == "own_reward":
        assert (folder / "comparison.html").is_file()


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


@pytest.fixture
def kernel(tmp_path):
    started = Kernel(tmp_path)
    yield started
    started.close()


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
    record = read_record(RunDir.open(tmp_path / "output" / "sft" / "002").record)
    assert record["outcome"] == "interrupted"
    steps = record["steps_done"] + 1

    resumed = run.format([f"max_steps={steps}", "save_steps=1", "resume_from_checkpoint=true"], [])
    outputs, error, _ = kernel.execute(resumed)
    assert error is None
    assert "sft/003 · finished" in tables(outputs)[0]
    assert read_record(RunDir.open(tmp_path / "output" / "sft" / "003").record)["steps_done"] == steps


def test_without_a_notebook_live_metrics_are_lines(tmp_path, monkeypatch, capsys):
    import roll_core as roll

    monkeypatch.chdir(tmp_path)
    config = Runs(tmp_path, "local").sft(max_steps=2)
    history = roll.run(config, callbacks=[roll.LiveMetrics(["train/loss", "absent"])]).history
    lines = re.findall(r"^sft/001 step=(\d) train/loss=(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [(int(step), float(loss)) for step, loss in lines] == [
        (each["step"], pytest.approx(each["train/loss"], rel=1e-5)) for each in history
    ]
