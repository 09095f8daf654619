"""The site of docs/ builds with strict links, and loads nothing from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roll_testing.new import KINDS

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=[\"']?https?:|<link[^>]* href=[\"']?https?:|@import")


@pytest.mark.slow(ci=True)
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "quickstart.html", "configuration.html"} <= {page.name for page in pages}
    assert (tmp_path / "site" / "reference" / "train.html").read_text().count("forward_backward") > 1
    pages_of = {"roll_core.errors": "ConfigError", "roll_core.types": "Reward", "roll_modeling.model": "load_model"}
    for module, member in pages_of.items():
        assert f'id="{module}.{member}"' in (tmp_path / "site" / "reference" / f"{module}.html").read_text()
    index = (tmp_path / "site" / "plugin-index.html").read_text()
    plugins = [tomllib.loads(file.read_text())["project"] for file in ROOT.glob("packages/*/pyproject.toml")]
    names = {each["name"] for each in plugins if "roll.plugins" in each.get("entry-points", {})}
    assert len(names) > 10
    assert [name for name in names if f'id="{name}"' not in index] == []
    assert {"math_rule", "hf_train", "wandb", "grpo", "roll_rewards()"} <= set(re.findall(r"<code>(.*?)</code>", index))
    assert {page.stem for page in (tmp_path / "site" / "examples").iterdir()} == set(KINDS)
    engine = (tmp_path / "site" / "examples" / "infer.html").read_text()
    assert {"class AcmeEngine(InferStrategy):", "class SeededSampling(LogitsProcessor):"} <= set(
        re.sub("<[^>]*>", "", engine).splitlines()
    )
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []


@pytest.mark.slow
def test_versions_of_the_site_stand_side_by_side(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    author = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, **author, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["NO_MKDOCS_2_WARNING"] = "1"
    for version in ("0.1", "0.2"):
        command = ["mike", "deploy", "--branch", "docs-site", "--update-aliases", version, "latest"]
        subprocess.run(command, cwd=clone, env=env, check=True)
    subprocess.run(["git", "checkout", "--quiet", "docs-site"], cwd=clone, check=True)
    versions = json.loads((clone / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in versions] == [("0.2", ["latest"]), ("0.1", [])]
    assert (clone / "0.1" / "quickstart.html").exists()
    assert "../0.2/index.html" in (clone / "latest" / "index.html").read_text()
