"""What `roll-core doctor` says of libraries that Megatron's layers are made of."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

from roll_core.config.loading import load
from roll_core.spec.diagnostics import CheckContext
from roll_core.spec.providers import CheckProvider
from roll_testing.train_kit import registry

RUN = """\
pipeline: sft
sft_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {{model_name_or_path: here}}
  strategy_args: {{strategy_name: {name}, strategy_config: {config}}}
"""


def installed(monkeypatch, **versions):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("roll_strategy_megatron.checks.importlib.metadata.version", version)


def said(tmp_path, config="{}", name="megatron_train"):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(name=name, config=config), encoding="utf-8")
    loaded = load(file, ["platform=cuda"], registry()).config
    module, _, name = registry().find(CheckProvider, "megatron_layers").target.partition(":")
    check = getattr(importlib.import_module(module), name)
    return {each.subject: each for each in check(CheckContext(platform=None, config=loaded))}


def test_installed_versions_are_reported(tmp_path, monkeypatch):
    installed(monkeypatch, **{"transformer-engine": "2.10.0", "flash-attn": "2.8.3"})
    found = said(tmp_path)
    assert [(name, each.level, each.found) for name, each in found.items()] == [
        ("transformer-engine", "ok", "2.10.0"),
        ("flash-attn", "ok", "2.8.3"),
    ]


@pytest.mark.parametrize("versions", [{}, {"transformer-engine": "1.13.0"}], ids=["absent", "old"])
def test_missing_packages_are_errors_only_if_requested(tmp_path, monkeypatch, versions):
    installed(monkeypatch, **versions)
    here = versions.get("transformer-engine", "not installed")
    found = said(tmp_path)["transformer-engine"]
    assert (found.level, found.found.partition(":")[0]) == ("note", here)
    found = said(tmp_path, "{transformer_impl: transformer_engine}")["transformer-engine"]
    assert (found.level, found.found) == ("error", here)
    assert found.wanted == "2.9 or newer, of which sft_train asks for layers"
    assert "pip install" in found.remedy
    assert said(tmp_path, "{transformer_impl: local}")["transformer-engine"].level == "note"


def test_no_warning_without_a_megatron_role(tmp_path, monkeypatch):
    installed(monkeypatch)
    assert not said(tmp_path, name="hf_train")
