"""Suites of other authors, run as they would run them: pytest in a process of its own, with their plugin installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGINS = (HERE.parent / "third_party" / "roll-acme", HERE / "suites" / "roll-wrong")


def install(project: Path, site: Path) -> None:
    """What an editable installation leaves: the sources on the path and a .dist-info with the entry points."""
    described = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{described['name'].replace('-', '_')}-{described['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {described['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = "".join(f"{name} = {target}\n" for name, target in described["entry-points"]["roll.plugins"].items())
    (info / "entry_points.txt").write_text(f"[roll.plugins]\n{points}", encoding="utf-8")


class Outcome:
    """Of a whole suite: what became of each test, by class."""

    def __init__(self, report: Path) -> None:
        self.tests: dict[str, dict[str, str]] = {}
        self.messages: dict[tuple[str, str], str] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            title, test = case.get("classname", "").rpartition(".")[2], case.get("name", "")
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            self.tests.setdefault(title, {})[test] = kinds[0] if kinds else "passed"
            for child in case:
                self.messages[title, test] = child.get("message", "")

    def failed(self, title: str) -> set[str]:
        """Names of the tests of one class that failed, without parameters."""
        found = self.tests[title].items()
        return {test.partition("[")[0] for test, result in found if result in ("failure", "error")}

    def reasons(self, title: str) -> str:
        """Why they failed."""
        found = self.tests[title].items()
        return "\n".join(
            f"{test}: {self.messages[title, test]}" for test, result in found if result in ("failure", "error")
        )


@pytest.fixture(scope="session")
def environ(tmp_path_factory):
    """Of a process in which the plugins are installed."""
    site = tmp_path_factory.mktemp("site")
    for project in PLUGINS:
        install(project, site)
    path = os.pathsep.join([str(site), *(str(project / "src") for project in PLUGINS), str(HERE.parent / "runs")])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def suites(environ, tmp_path_factory):
    """The `Outcome` of all suites for strategies, run as their authors would run them."""
    # Listing takes a process each: here it is enough to see one that is right and the one that is not.
    chosen = "not test_listing or Test_right or Test_heavy or TestAcme"
    return outcome(["acme_suite.py", "wrong_suite.py"], chosen, environ, tmp_path_factory)


@pytest.fixture(scope="session")
def platform_suites(environ, tmp_path_factory):
    """The `Outcome` of the suites for platforms."""
    return outcome(["platforms_suite.py"], "not test_listing or Test_right", environ, tmp_path_factory, processes=0)


@pytest.fixture(scope="session")
def flow_suites(environ, tmp_path_factory):
    """The `Outcome` of the suite for module programs."""
    return outcome(["flows_suite.py"], "Test_", environ, tmp_path_factory, processes=0)


@pytest.fixture(scope="session")
def executor_suites(environ, tmp_path_factory):
    """The `Outcome` of the suite for executors."""
    # Processes take seconds to start: those of a wrong one only where it is wrong.
    wrong = "Test_hides_n or Test_leaves_p or Test_deaf or Test_forgets_the or Test_silent_e or Test_loses"
    ends = "test_closing or test_a_failed_start or test_an_exit or test_a_survived or test_workers_see"
    chosen = f"(not test_listing or Test_right) and (not ({wrong}) or {ends})"
    return outcome(["executors_suite.py"], chosen, environ, tmp_path_factory, processes=0)


@pytest.fixture(scope="session")
def engine_suites(environ, tmp_path_factory):
    """The `Outcome` of the suite of the wrong engines."""
    # Thousands of tokens are drawn for a test of a distribution: only where sampling is what is wrong, or right.
    distributions = "test_tokens_come or test_temperature_div or test_top_ or test_min_p or test_parameters"
    # Names of classes and of tests match alike, whatever their case: those of classes are as long as they need to be.
    sampled = "Test_right or Test_temperature_f or Test_top_p_o or Test_top_k_o or Test_min_p_i or Test_cuts"
    chosen = f"(not test_listing or Test_right) and (not ({distributions}) or {sampled})"
    return outcome(["wrong_engines_suite.py"], chosen, environ, tmp_path_factory)


def outcome(names, chosen, environ, tmp_path_factory, processes=2):
    report = tmp_path_factory.mktemp("report") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-k", chosen]
    command += ["-n", str(processes), "--dist", "loadscope", f"--junitxml={report}"]
    command += [str(HERE / "suites" / name) for name in names]
    done = subprocess.run(command, env=environ, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr  # some failed, as they should
    return Outcome(report)
