"""`./run run python tools/image_requirements.py [TARGET...]`: every version that goes into the images.

For each target of docker/bake.json, to docker/requirements: what its packages of ours require, with engines, and the
extras for every run. torch is that of the workspace.
Builds of torch for other hardware come from PyTorch's own index when an image is built, under the same version; nothing
of theirs is in the lists.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from typing import Any

from environments import REPOSITORY
from packaging.requirements import Requirement

BAKE = REPOSITORY / "docker" / "bake.json"
FOLDER = REPOSITORY / "docker" / "requirements"
EXTRAS = {"roll_core": "train", "roll_rewards": "math", "roll_trackers": "tensorboard"}
"""Extras that every image has, by package."""
NARROWER = {"npu": ["torch-npu==2.13.*"]}
"""Beside what the packages themselves require: torch-npu belongs to one release of torch."""
OF_CUDA = re.compile(r"nvidia-(?!ml-py)|cuda-|triton==")
PLATFORM = "x86_64-manylinux_2_35"


def main(names: list[str]) -> int:
    """2 if there is no such target."""
    targets = {name: each for name, each in read(BAKE)["target"].items() if "args" in each}
    for name in names:
        if name not in targets:
            print(f"there is no target {name!r}; there are {', '.join(targets)}", file=sys.stderr)
            return 2
    for name in names or targets:
        arguments = targets[name]["args"]
        wanted = requirements(arguments["PACKAGES"].split()) + NARROWER.get(name, [])
        lines = resolve(wanted, python=arguments.get("PYTHON", "3.12"), cuda=not arguments["TORCH_BACKEND"])
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{arguments['REQUIREMENTS']}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} packages")
    return 0


def requirements(packages: list[str]) -> list[str]:
    """What our packages need of others."""
    found: list[str] = []
    for package in packages:
        project = read(REPOSITORY / "packages" / package.replace("_", "-") / "pyproject.toml")["project"]
        found += project["dependencies"]
        if package in EXTRAS:
            found += project["optional-dependencies"][EXTRAS[package]]
    return sorted({each for each in found if not Requirement(each).name.startswith("roll-")})


def resolve(wanted: list[str], *, python: str, cuda: bool) -> list[str]:
    """`name==version` of everything; without `cuda` less what PyPI's torch alone needs, which is built for CUDA."""
    # uv says to what it runs where it is.
    command = [os.environ.get("UV", "uv"), "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += [
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--python-version",
        python,
        "--python-platform",
        PLATFORM,
    ]
    # Builds of torch for this host are not those that an image gets.
    env = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
    text = "\n".join(wanted) + "\n"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        # The workspace leaves engines out (`override-dependencies`); the images have them.
        overrides.write("\n".join(each for each in wanted if Requirement(each).name in left_out()))
        overrides.flush()
        command += ["--overrides", overrides.name]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=env, input=text, stdout=subprocess.PIPE, text=True, check=True
        )
    return [line for line in done.stdout.splitlines() if cuda or not OF_CUDA.match(line)]


def left_out() -> set[str]:
    """Names of the packages that the workspace's environment has not."""
    root = read(REPOSITORY / "pyproject.toml")
    return {Requirement(each).name for each in root["tool"]["uv"]["override-dependencies"]}


def read(file: Any) -> dict[str, Any]:
    """TOML or JSON."""
    text = file.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
