import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.cli import main as cli
from roll_core.errors import RunDirectoryError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.guards import GuardEvent
from roll_core.runtime.records.ledger import LedgerRow
from roll_core.runtime.records.record import RunFacts, RunRecord
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.run_files import ImagesFile, read_lines
from roll_core.runtime.records.tracking import MetricsFile
from roll_testing.errors import mentions
from roll_tools.evaluation import task_scores
from roll_tools.page import write_report

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)> </script><!-- ]]> & 多言語 🎉 \u2028"
ROWS = [
    LedgerRow(stage="rollout", seconds=60.0, share=0.6, entries=20, tokens=6000),
    LedgerRow(stage="train", seconds=39.0, share=0.39, entries=20),
    LedgerRow(stage="other", seconds=1.0, share=0.01, entries=0),
]


MIB = 2**20
MEMORY = [
    {"roles": ["actor_train"], "ranks": [0], "host": "here", "pid": 7, "measured_bytes": 1000 * MIB,
     "device_measured_bytes": 4000 * MIB},
    {"roles": ["actor_infer"], "ranks": [0], "host": "here", "pid": 8, "measured_bytes": 50 * MIB,
     "device_measured_bytes": None},
]  # fmt: skip
PREDICTION = {
    "unknown": ["actor_infer"],
    "on_slots": True,
    "phases": [["train", "actor_train", 3000 * MIB, 1000 * MIB], ["save", "actor_train", 2000 * MIB, 1100 * MIB]],
}


class Page(HTMLParser):
    """What a browser would find: elements, text outside scripts, and the samples."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += f" {data} "

    def charts(self) -> list[str]:
        return [str(attrs.get("aria-label")) for tag, attrs in self.tags if tag == "svg"]

    def samples(self) -> list[dict[str, object]]:
        return next(json.loads(script) for script in self.scripts if script.startswith("["))


def make_run(output: Path, *, ends: bool = True, error: BaseException | None = None) -> RunDir:
    run = RunDir.create(output, "grpo")
    plugin = {"package": "roll-infer-acme", "version": "1.2", "hook_api": 1, "provides": {"infer": ["acme"]}}
    facts = RunFacts(
        name=run.name, pipeline="rlvr", seed=3, argv=("roll-core", "run"), plugins=(plugin,), steps_asked=20
    )
    record = RunRecord(run.record, facts)
    record.weight_transport("actor_train", "actor_infer", "shared")
    record.guard_event(GuardEvent(guard="logprob_gap", action="warn", message="gap of 0.2", step=4, time=1.0, since=4))
    record.update(memory=MEMORY)
    (run.path / "prediction.json").write_text(json.dumps(PREDICTION))
    metrics = MetricsFile(run.metrics)
    for step in range(21):
        row = {"score/mean": step / 20, "score/min": 0.0, "score/max": 1.0 + step, "actor/loss": -0.5, "kl/coef": 0.1}
        row |= {
            "weight_sync/tensors": 10.0,
            "time/rollout": 3.0,
            "time/other": 0.1,
            "time/step": 3.1,
            "tokens/trained": 50,
        }
        row |= {"custom/thing": float(step % 3), "actor/grad_norm": float("nan") if step == 7 else 1.0 + step}
        metrics.log(step, row | ({"val/score/mean": 0.2 + step / 40} if step % 10 == 0 else {}))
    metrics.close()
    rows = [
        {"step": step, "split": "train", "id": f"{step}/{i}", "group": str(step), "prompt": f"prompt {step}",
         "response": ATTACK if i else "fine", "reward": float(i), "response_tokens": 5}
        for step in range(1, 21) for i in range(2)
    ]  # fmt: skip
    run.samples.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    run.config.write_text("pipeline: rlvr\n# a comment\njudge:\n  api_key: hunter2hunter2\n  note: <b>bold</b>\n")
    run.log.write_text("INFO the last line\n")
    with CheckpointDirectory(run.checkpoints).writing(10, {}) as path:
        (path / "weights").write_bytes(b"x" * 2048)
    if ends:
        record.finish(error, time_rows=[asdict(row) for row in ROWS])
    return run


def page_of(run: RunDir) -> Page:
    path = write_report(run.path)
    assert path == run.report
    return Page(path.read_text(encoding="utf-8"))


def test_the_report_shows_the_whole_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    for part in (
        "grpo/001 finished", "held-out score 0.7 from 0.2", "steps 20 / 20", "rlvr", "guards tripped 1", "gap of 0.2",
        "rollout 1 min 00 s 60.0 % 20 100", "other 1.0 s 1.0 %", "total 1 min 40 s 100 %",
        "actor_train -> actor_infer shared",
        "checkpoints/step-10", "roll-infer-acme 1.2", "infer: acme", "pipeline: rlvr", "INFO the last line", "custom",
        "kl/coef 0.1", "1 not finite",
        "actor_train 7 on here host 1,100 MiB 1,000 MiB +10%", "actor_train 7 on here device 3,000 MiB 4,000 MiB -25%",
        "actor_infer 8 on here host unknown 50 MiB",
    ):  # fmt: skip
        assert part in page.text, part
    charts = " ".join(page.charts())
    for name in (
        "val/score/mean, last value 0.7",
        "score/mean, last value 1",
        "actor/grad_norm, last value 21",
        "custom/thing",
    ):
        assert name in charts
    assert "score/max" not in charts  # it is the range around score/mean


def test_the_report_needs_no_network_and_runs_no_foreign_script(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if tag == "meta" and "content" in attrs and "default-src" in str(attrs["content"])
    )
    assert str(policy).startswith("default-src 'none'")
    for _, attrs in page.tags:
        assert not {"src", "srcset", "data", "action", "background"} & set(attrs)
        assert str(attrs.get("href") or "#").startswith("#")
        assert not [name for name in attrs if name.startswith("on")]
    html = (tmp_path / "grpo" / "001" / "report.html").read_text()
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", html)


def test_texts_of_a_model_and_of_files_stay_text(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert len(page.scripts) == 4
    assert "img" not in {tag for tag, _ in page.tags}
    assert "<b>bold</b>" in page.text
    samples = page.samples()
    assert len(samples) == 40
    assert samples[1]["response"] == ATTACK


def test_grids_of_images_are_in_the_page_with_their_captions(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    images = ImagesFile(run.images)
    images.write(0, [b"\x89PNG-first"], ["reward 0.1"], split="val")
    images.write(8, [b"\x89PNG-last", b"\x89PNG"], [ATTACK, "reward 0.9"], split="val")
    images.close()
    with run.images.open("a") as file:  # damaged rows
        file.write('{"step": 9, "images": [{"png": "x\\" onload=a", "caption": ""}]}\n{"step": 9, "images": [1]}\n{"st')
    page = page_of(run)
    sources = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert sources == [f"data:image/png;base64,{b64encode(png).decode()}" for png in (
        b"\x89PNG-first", b"\x89PNG-last", b"\x89PNG"
    )]  # fmt: skip
    assert "alert(2)" in page.text
    assert "reward 0.9" in page.text
    assert [attrs["data-at"] for _, attrs in page.tags if "data-at" in attrs] == ["step 0, val", "step 8, val"]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_a_resumed_run_continues_the_images_up_to_its_checkpoint(tmp_path: Path) -> None:
    first, second = tmp_path / "before" / "images.jsonl", tmp_path / "images.jsonl"
    first.parent.mkdir()
    images = ImagesFile(first)
    for step in (0, 2, 4):
        images.write(step, [b"x"], ["a"], split="val")
    images.close()
    resumed = ImagesFile(second, history=first.parent, resumed_step=2)
    resumed.write(3, [b"y"], ["b"], split="val")
    resumed.close()
    assert [row["step"] for row in read_lines(second)] == [0, 2, 3]
    ImagesFile(tmp_path / "none.jsonl").close()
    assert not (tmp_path / "none.jsonl").exists()


def test_secrets_are_not_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_report(run.path)
    assert "hunter2" not in run.report.read_text()


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, error=RuntimeError("<out of memory>")))
    assert "grpo/001 failed" in page.text
    assert mentions(page.text, "RuntimeError")


def test_running_run_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, ends=False)
    page = page_of(run)
    assert "grpo/001 running" in page.text
    assert "Sum of the recorded steps" in page.text
    assert "rollout 1 min 03 s 96.8 %" in page.text  # 21 steps of 3 s and 0.1 s


def test_run_without_its_process_was_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, ends=False)
    record = json.loads(run.record.read_text())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record["process"]["pid"] = ended.pid
    run.record.write_text(json.dumps(record))
    page = page_of(run)
    assert "grpo/001 killed" in page.text
    assert mentions(page.text, "process")


def test_an_empty_directory_makes_a_report_that_says_so(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    page = page_of(run)
    assert "x/001 unknown" in page.text
    assert mentions(page.text, "run.json")
    assert "No step has been recorded yet" in page.text


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("finished"))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_or_damaged_files_still_make_a_report(
    tmp_path: Path, finished_run: RunDir, data: st.DataObject
) -> None:
    run = RunDir(tmp_path / "copy")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(finished_run.path, run.path)
    file = data.draw(st.sampled_from([run.record, run.metrics, run.samples, run.config, run.log]))
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    rest = data.draw(st.sampled_from([b"", b"\xff\x00\xfe", b'{"step": "x"}\n', b"}{\n", content[cut + 7 :]]))
    file.write_bytes(content[:cut] + rest)
    assert "<title>" in write_report(run.path).read_text()


FIELDS = [
    "name", "pipeline", "outcome", "error", "started", "ended", "steps_done", "steps_asked", "weight_transports",
    "guards", "time", "versions", "git", "host", "process", "plugins", "argv", "cwd", "resumed_from", "memory",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["NaN", "Infinity", "x", "1e400"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["stage", "seconds", "roles", "measured_bytes"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_a_record_with_any_nonsense_in_it_still_makes_a_report(
    tmp_path: Path, finished_run: RunDir, field: str, value: object
) -> None:
    run = RunDir(tmp_path / "copy")
    run.path.mkdir(exist_ok=True)
    record = json.loads(finished_run.record.read_text())
    run.record.write_text(json.dumps(record | {field: value}))
    assert "<title>" in write_report(run.path).read_text()


@pytest.mark.parametrize("process", [{"pid": float("inf")}, {"created": None}, {"created": "x"}])
def test_a_damaged_process_in_a_record_is_a_killed_run(tmp_path: Path, process: dict[str, object]) -> None:
    run = make_run(tmp_path, ends=False)
    record = json.loads(run.record.read_text())
    record["process"] |= process
    run.record.write_text(json.dumps(record))
    assert "grpo/001 killed" in page_of(run).text


def test_numbers_that_json_does_not_have_still_make_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.samples.open("a") as stream:
        stream.write('\n{"step": 1, "prompt": "p", "response": "r", "reward": NaN}\n')
    with run.metrics.open("a") as stream:
        stream.write('\n{"step": 30, "time/step": 2, "time/rollout": Infinity}\n')
    assert "NaN" in [row["reward"] for row in page_of(run).samples() if "reward" in row]


def test_many_samples_are_thinned_by_whole_steps(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    rows = (
        {"step": step, "prompt": "p", "response": "r", "group": str(i)} for step in range(1, 1251) for i in range(8)
    )
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(run)
    steps = [row["step"] for row in page.samples()]
    assert 2000 < len(steps) <= 4010
    assert steps[-1] == 1250
    assert all(steps.count(step) == 8 for step in set(steps))
    assert mentions(page.text, 10_000 - len(steps))


def test_a_long_run_makes_a_page_of_moderate_size(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    names = [f"actor/metric_{i}" for i in range(10)]
    with run.metrics.open("w") as stream:
        for step in range(5000):
            stream.write(json.dumps({"step": step} | dict.fromkeys(names, step * 7919 % 1000)) + "\n")
    write_report(run.path)
    assert run.report.stat().st_size < 1_500_000


def test_the_command_takes_a_run_or_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    for path in (run.path, tmp_path / "grpo", tmp_path / "grpo" / "latest"):
        run.report.unlink(missing_ok=True)
        assert cli.main(["report", str(path)]) == 0
        assert capsys.readouterr().out == f"{run.report}\n"
        assert run.report.exists()
    assert cli.main(["report", str(tmp_path / "nowhere")]) == RunDirectoryError.exit_code


def test_tasks_have_their_score_turns_tokens_and_cost(tmp_path):
    run = RunDir(tmp_path)
    responses = [
        {"prompt": "a", "tag": "swe", "score": score, "answer": "", "num_tokens": sampled, "cut": False}
        | {"task": task, "turns": turns, "read_tokens": read}
        for task, score, turns, read, sampled in [
            ("fix", 1.0, 2, 100, 10),
            ("fix", 0.0, 4, 300, 30),
            ("add", None, 1, 50, 5),
        ]
    ]
    rows = [{"step": 1, "responses": responses[:1]}, {"step": 2, "responses": responses[1:]}]
    run.scores.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run.metrics.write_text('{"step": 2, "val/num_samples": 3}\n', encoding="utf-8")
    table = task_scores(run, {"swe": {"read": 1.0, "sampled": 10.0}})
    assert table.columns == ["episodes", "score", "turns", "tokens read", "tokens sampled", "cost"]
    assert table.rows == [
        ("swe: add", ["1", "", "1", "50", "5", "0.0001"]),
        ("swe: fix", ["2", "0.5", "3", "200", "20", "0.0004"]),
    ]
    run.config.write_text("custom_envs: {swe: {prices: {read: 1.0, sampled: 10.0}}}", encoding="utf-8")
    assert '<td class="mono">swe: fix</td>' in write_report(tmp_path).read_text(encoding="utf-8")
