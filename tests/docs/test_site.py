"""The site of docs/ builds with strict links, and loads nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=[\"']?https?:|<link[^>]* href=[\"']?https?:|@import")


def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "quickstart.html", "configuration.html"} <= {page.name for page in pages}
    assert (tmp_path / "site" / "reference" / "train.html").read_text().count("forward_backward") > 1
    index = (tmp_path / "site" / "plugin-index.html").read_text()
    plugins = [tomllib.loads(file.read_text())["project"] for file in ROOT.glob("packages/*/pyproject.toml")]
    names = {each["name"] for each in plugins if "roll.plugins" in each.get("entry-points", {})}
    assert len(names) > 10
    assert [name for name in names if f'id="{name}"' not in index] == []
    assert {"math_rule", "hf_train", "wandb", "grpo", "roll_rewards()"} <= set(re.findall(r"<code>(.*?)</code>", index))
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
