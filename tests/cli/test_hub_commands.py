"""`check`, `audit` and `doctor` on data sets of a local hub, and `audit` on files of known formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import roll_core as roll
from roll_core.cli.main import main
from roll_core.errors import ConfigError
from roll_testing.errors import mentions
from shared_tests.dataset_hub import DatasetHub, serving_datasets, use_hub
from shared_tests.hf_plugins import HF_PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("datasets")
NAME = "hf://me/sums?split=train"
CONFIG = f"""\
pipeline: sft
tokenizer: {{kind: byte}}
sft_train:
  model_args: {{random_init: {{model_type: llama}}}}
  data_args:
    file_name: {NAME}
    columns: {{prompt: "{{{{ question }}}}", response: "{{{{ answer }}}}"}}
  strategy_args: {{strategy_name: hf_train}}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", HF_PACKAGES)
    (tmp_path / "run.yaml").write_text(CONFIG)
    with serving_datasets() as served:
        use_hub(served.url, tmp_path, monkeypatch)
        served.push("me/sums", {"default": {"train": [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(9)]}})
        yield served


def problems(overrides: dict[str, object] | None = None) -> list[tuple[str, str]]:
    """Keys and codes of the mistakes that `check` finds."""
    try:
        roll.check("run.yaml", overrides)
    except ConfigError as error:
        return [(problem.key, problem.code) for problem in error.problems]
    return []


def test_check_reads_the_first_rows_of_the_hub(hub: DatasetHub) -> None:
    assert problems() == []
    at = "sft_train.data_args"
    for name in ("hf://me/none", "hf://me/sums?split=test", "hf://me"):
        assert problems({f"{at}.file_name": name}) == [(f"{at}.file_name", "ROLL-D001")]
    assert problems({f"{at}.columns.prompt": "{{ qestion }}"}) == [(f"{at}.file_name", "ROLL-D001")]
    assert problems({f"{at}.columns.prompt": "{{ question"}) == [(f"{at}.columns", "ROLL-C014")]
    assert problems({f"{at}.response": "solution"}) == [(f"{at}.response", "ROLL-D001")]
    assert problems({"prompt_length": 2}) == [("prompt_length", "ROLL-C040")]


def test_audit_and_doctor_name_the_data_set(hub: DatasetHub, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run.yaml"], [NAME, "prompt=question", "response=answer"]):
        assert main(["audit", *words, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert next(each["found"] for each in printed["findings"] if each["check"] == "rows") == "9 rows"
        assert printed["rows"][0]["where"] == f"{NAME} row 1"
        assert ["1<eos>", True] in printed["rows"][0]["pieces"]
    main(["doctor", "run.yaml", "--json"])
    found = next(each for each in json.loads(capsys.readouterr().out)["findings"] if each["check"] == "data")
    assert (found["level"], mentions(found["found"], NAME)) == ("ok", True)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"instruction": "a", "input": "c", "output": "b"}, "Alpaca"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "ShareGPT"),
        ({"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "OpenAI"),
    ],
)
def test_audit_names_the_format_and_its_keys(
    hub: DatasetHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, object], shape: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["audit", "rows.jsonl", "--json"]) == 0
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    text = findings["shape"]["found"]
    assert mentions(text, shape)
    assert findings["rows"]["level"] == "ok"
    # The printed keys are those of a config that reads the file.
    keys = text[text.index("data_args") :]
    (tmp_path / "run.yaml").write_text(
        "pipeline: sft\ntokenizer: {kind: byte}\nsft_train:\n  model_args: {random_init: {model_type: llama}}\n"
        f"  {keys[:-1]}, template: plain}}\n  strategy_args: {{strategy_name: hf_train}}\n"
    )
    assert problems() == []
