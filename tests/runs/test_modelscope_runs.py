"""A whole run on a model and rows of ModelScope, from a local server with its API."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from roll_core.data.modelscope import with_local_files
from roll_core.errors import ModelError
from roll_core.spec.model import ModelSpec
from roll_testing.errors import raises_error
from shared_tests.modelscope_hub import serving_modelscope, use_modelscope

pytest.importorskip("datasets")
pytest.importorskip("modelscope")


@pytest.mark.slow
def test_a_run_on_modelscope_equals_one_on_files(local_runs, monkeypatch):
    base = local_runs.ok(local_runs.sft(exp_name="base", max_steps=1))
    keys = {"max_steps": 2, "tokenizer": None}
    local = local_runs.ok(local_runs.sft(exp_name="local", pretrain=str(base.run_dir.export), **keys))
    config = local_runs.sft(exp_name="hub", pretrain="me/tiny", system_envs={"USE_MODELSCOPE": "1"}, **keys)
    config["sft_train"]["data_args"]["file_name"] = "modelscope://me/digits"
    with serving_modelscope() as hub:
        use_modelscope(hub.url, local_runs.folder, monkeypatch)
        hub.push_folder("models/me/tiny", base.run_dir.export)
        hub.push("datasets/me/digits", {"train.jsonl": (local_runs.folder / "train.jsonl").read_bytes()})
        run = local_runs.ok(config)
    assert local_runs.timeless(run)[2:] == local_runs.timeless(local)[2:]
    one, two = (load_file(made.run_dir.export / "model.safetensors") for made in (local, run))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert list(json.loads(run.run_dir.record.read_text(encoding="utf-8"))["datasets"]) == ["modelscope://me/digits"]


def test_a_worker_on_another_host_downloads_the_model(tmp_path, monkeypatch):
    elsewhere = ModelSpec(path="/hosts/driver/me--tiny", modelscope_id="me/tiny")
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    with serving_modelscope() as hub:
        hub.push("models/me/tiny", {"config.json": b"{}"})
        use_modelscope(hub.url, tmp_path, monkeypatch)
        model = with_local_files(elsewhere)
        assert model.path.startswith(str(tmp_path))
        assert with_local_files(model) == model
    use_modelscope("http://127.0.0.1:9", tmp_path / "other", monkeypatch)
    with raises_error(ModelError, "me/tiny", "--model"):
        with_local_files(elsewhere)
