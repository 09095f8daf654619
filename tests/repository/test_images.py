"""The images cannot be built in tests; what can be read of them can be checked."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
TARGETS = {
    name: target["args"]
    for name, target in json.loads((REPOSITORY / "docker" / "bake.json").read_text())["target"].items()
    if "args" in target
}


def pins(target: str) -> dict[str, Requirement]:
    lines = (REPOSITORY / "docker" / "requirements" / f"{TARGETS[target]['REQUIREMENTS']}.txt").read_text().splitlines()
    return {(each := Requirement(line)).name: each for line in lines}


def test_hadolint_passes():
    hadolint = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run(
        [hadolint, "--config", str(REPOSITORY / "docker" / "hadolint.yaml"), str(DOCKERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_that_others_make_has_a_version():
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    own = {name for _, name in stages}
    foreign = [image for image, _ in stages if image not in own and "$" not in image]
    assert len(foreign) == 5
    assert [image for image in foreign if not re.search(r":\d+\.\d+\.\d+", image)] == []


def test_containers_are_not_root_and_run_the_doctor():
    last = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\w+)", last, re.MULTILINE)[-1] == "1000"
    assert re.search(r'^HEALTHCHECK .*CMD \["roll-core", "doctor"\]$', last, re.MULTILINE)


def test_targets_give_the_arguments_that_there_are():
    known = set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE))
    stages = set(re.findall(r" AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE))
    for arguments in TARGETS.values():
        assert set(arguments) <= known
        assert arguments["BASE"] in stages


@pytest.mark.parametrize("target", TARGETS)
def test_images_pin_versions_that_our_packages_accept(target):
    pinned = pins(target)
    for requirement in pinned.values():
        (pin,) = requirement.specifier
        assert pin.operator == "=="
    of_cuda = {name for name in pinned if name.startswith(("nvidia-cu", "cuda-", "triton"))}
    assert bool(of_cuda) == (TARGETS[target]["BASE"] == "cuda")
    for package in TARGETS[target]["PACKAGES"].split():
        folder = REPOSITORY / "packages" / package.replace("_", "-")
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for asked in map(Requirement, project["dependencies"]):
            if asked.name.startswith("roll-"):
                continue
            (pin,) = pinned[asked.name].specifier
            assert asked.specifier.contains(Version(pin.version), prereleases=True), f"{package}: {asked}"


def test_an_engine_is_of_the_version_that_its_plugin_supports():
    from roll_infer_sglang import plugin as sglang
    from roll_infer_vllm import plugin as vllm

    for target, name, supported in (("cuda-vllm", "vllm", vllm.VERSIONS), ("cuda-sglang", "sglang", sglang.VERSIONS)):
        (pin,) = pins(target)[name].specifier
        assert Requirement(f"{name}{supported}").specifier.contains(pin.version)


def test_dockerignore_keeps_all_paths_the_build_copies():
    kept = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {"!pyproject.toml", "!packages", "!docker/requirements"} <= set(kept)
    copied = re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    mounted = re.findall(r"type=bind,source=([^,]+)", DOCKERFILE.read_text())
    assert {f"!{each}" for each in copied + mounted} <= set(kept)
