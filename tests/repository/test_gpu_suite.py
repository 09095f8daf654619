"""`./run gpu`: parts that fail or hang do not stop the next, results are there after each, a rehearsal passes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_testing.errors import mentions

REPOSITORY = Path(__file__).resolve().parents[2]
SUITE = REPOSITORY / "tools" / "gpu" / "suite.py"


@pytest.fixture(scope="module")
def suite():
    spec = importlib.util.spec_from_file_location("gpu_suite", SUITE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def part(suite, code, **fields):
    return suite.Part(name="some part", command=("-c", code), deadline_s=30.0, **fields)


def run(suite, tmp_path, code, **fields):
    return suite.run_part(part(suite, code, **fields), "cuda", os.environ, tmp_path)


def test_failed_or_hung_part_is_distinguished_from_a_pass(suite, tmp_path):
    figures = "import json; print('said before'); print(json.dumps({'figures': {'n': 3}}))"
    assert run(suite, tmp_path, figures)["figures"] == {"n": 3}
    assert run(suite, tmp_path, figures)["status"] == "passed"
    failed = run(suite, tmp_path, f"{figures}; raise SystemExit(1)")
    assert (failed["status"], failed["exit_code"], failed["figures"]) == ("failed", 1, {"n": 3})
    assert run(suite, tmp_path, f"raise SystemExit({suite.NOT_RUN})")["status"] == "not run"
    assert run(suite, tmp_path, "", modules=("no_such_module",))["status"] == "not installed"


def test_a_part_that_hangs_is_killed_with_its_children(suite, tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    hanging = suite.Part(name="hangs", command=("-c", code), deadline_s=1.0)
    assert suite.run_part(hanging, "cuda", os.environ, tmp_path)["status"] == "timed out"


def test_device_parts_never_pass_on_a_cpu(suite, tmp_path):
    entry = suite.run_part(part(suite, "", needs_device="two devices"), "cpu", os.environ, tmp_path)
    assert (entry["status"], entry["why"]) == ("needs a device", "two devices")


@pytest.mark.parametrize(
    ("options", "tiny"), [(["acme", "--rehearsal"], 1), (["cpu"], 1), (["acme"], 0)], ids=["option", "cpu", "device"]
)
def test_rehearsal_lists_its_parts_and_results(suite, tmp_path, monkeypatch, options, tiny):
    code = "import json, os; print(json.dumps({'figures': {'tiny': int(os.environ.get('ROLL_GPU_REHEARSAL', 0))}}))"
    monkeypatch.setattr(suite, "PARTS", (part(suite, code),))
    monkeypatch.setattr(sys, "argv", ["./run gpu", "--out", str(tmp_path), "--device", *options])
    assert suite.main() == 0
    (file,) = tmp_path.glob("*.json")
    assert file.stem == options[0] + ("-rehearsal" if tiny else "")
    found = json.loads(file.read_text())
    assert (found["rehearsal"], found["parts"][0]["figures"]) == (bool(tiny), {"tiny": tiny})


@pytest.mark.parametrize("device", ["rocm", "acme"])
def test_any_platform_can_be_named(suite, tmp_path, monkeypatch, device):
    """A platform that this host lacks is an error of the parts, not of the command line."""
    command = ["./run gpu", "--device", device, "--only", "probe", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert suite.main() == 1
    parts = {each["part"]: each for each in json.loads((tmp_path / f"{device}.json").read_text())["parts"]}
    assert parts["probe"]["status"] == "failed"
    assert mentions("\n".join(parts["probe"]["output"]), device)


def test_results_are_there_after_each_part(suite, tmp_path):
    results = suite.Results(tmp_path, "cpu", rehearsal=True)
    for number in (1, 2):
        results.add(part(suite, ""), {"status": "passed", "seconds": 1.0, "figures": {"number": number}})
        assert len(json.loads(results.json.read_text())["parts"]) == number
        assert results.markdown.read_text().count("| some part |") == number


def test_every_part_is_in_the_docs(suite):
    page = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8")
    listed = {
        row.partition("`")[2].partition("`")[0].removesuffix(" …") for row in page.splitlines() if "| `" in row[:3]
    }
    assert all(any(each.name.startswith(name) for name in listed) for each in suite.PARTS)


@pytest.mark.parametrize("options", [["--system-python", "--wheels", "w"], ["--only", "probe", "--system-python"]])
def test_the_systems_own_python_needs_no_uv(tmp_path, options):
    stub = tmp_path / "python3"
    stub.write_text('#!/bin/sh\necho called with "$@"\n')
    stub.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    command = [str(REPOSITORY / "run"), "gpu", *options]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["called", "with", "tools/gpu/suite.py", *options]


def test_missing_packages_of_the_system_python_are_named(suite, tmp_path, monkeypatch, capsys):
    assert suite.missing_packages(sys.path) == []
    assert {"msgpack", "pluggy", "pytest", "torch", "transformers"} <= set(suite.missing_packages([str(tmp_path)]))
    # A wheel is installed without what it requires, under a condition or not.
    monkeypatch.setattr(suite, "SITE", tmp_path)
    info = tmp_path / "peft-1.dist-info"
    info.mkdir()
    requires = 'Requires-Dist: No_Such.Package>=2\nRequires-Dist: neither; extra == "more"\n'
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: peft\nVersion: 1\n{requires}")
    assert suite.missing_packages([str(tmp_path), *sys.path]) == ["no-such-package"]
    monkeypatch.setattr(sys, "argv", ["./run gpu", "--system-python", "--only", "probe"])
    monkeypatch.setattr(suite, "missing_packages", lambda path: ["pluggy"])
    assert suite.main() == 2
    assert mentions(capsys.readouterr().err, "pluggy", "--wheels")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_passes_with_the_systems_own_python(suite, tmp_path):
    """The environment's Python stands in for the machine's: packages and their plugins are found by path alone."""
    command = [sys.executable, str(SUITE), "--device", "cpu", "--system-python", "--out", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    entries = {each["part"]: each for each in json.loads((tmp_path / "cpu-rehearsal.json").read_text())["parts"]}
    assert set(entries) == {each.name for each in suite.PARTS}
    for each in suite.PARTS:
        allowed = (
            {"needs a device"} if each.needs_device else {"passed", "not installed"} if each.modules else {"passed"}
        )
        assert entries[each.name]["status"] in allowed, entries[each.name]
