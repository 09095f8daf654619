"""A run that ends by a known error tells the remedy wherever it tells the error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_core.cli.main import main
from roll_testing.errors import mentions

BIG = """\
pipeline: sft
tokenizer: {kind: char}
max_steps: 1
prompt_length: 8
response_length: 8
sft_train:
  model_args:
    dtype: fp32
    random_init: {model_type: qwen3, hidden_size: 4000000, intermediate_size: 4000000, num_hidden_layers: 1,
      num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
"""One matrix of 64 TB."""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "big.yaml").write_text(BIG)
    return "big.yaml"


def test_a_model_larger_than_the_host(config, capsys):
    assert main(["run", config]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "can't allocate memory: you tried to allocate" in shown
    assert mentions(shown, "world_size", "kv_cache_gib")
    (run,) = Path("output/roll").glob("[0-9]*")
    error = json.loads((run / "run.json").read_text())["error"]
    assert "docs/troubleshooting.md#host_memory" in error["advice"]
    assert mentions((run / "report.html").read_text(), "world_size", "kv_cache_gib")


@pytest.mark.parametrize(("advice", "traced"), [("make room", False), ("", True)])
def test_known_foreign_error_ends_without_a_traceback(advice, traced, config, monkeypatch, capsys):
    from roll_core.runtime.run import loop

    result = SimpleNamespace(error=OSError(28, "No space left on device"), advice=advice, exit_code=1)
    monkeypatch.setattr(loop, "execute", lambda *_, **__: result)
    assert main(["run", config]) == 1
    assert (mentions(capsys.readouterr().err, "28")) is traced
