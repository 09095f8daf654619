"""`./run test-engines [NAME...] [PYTEST ARGUMENTS...]`: tests of the plugins that wrap an engine, beside the engine.

The table `[tool.roll.engine]` of a package under `packages/` says what its engine is: the package's own `dependencies`
of these names, which the workspace leaves out (`override-dependencies`), other `requirements` in their place,
distributions to install `alone`, without what these require, and distributions to `remove` again. An engine's name is
the end of the package's: `deepspeed` of `roll-strategy-deepspeed`. Each gets an environment of its own under
`.engines/`, made of the repository's own files;
where the table says `workspace = true`, the workspace's environment has all that it needs.

Where the table has `oldest`, requirements of the oldest version that the package supports, `NAME-oldest` is an engine
as well. They replace those of the same distributions. Where the table has `newest-python`, the Python version that the
newest supported engine needs, `NAME-newest` is an engine as well, in an environment with that Python. Both are tested
only if they are named.

A peer is another framework whose numbers ours are compared with: `[tool.roll.peers.NAME]` of the repository's
`pyproject.toml` has the `packages` of ours that its tests need, its `requirements`, those that are installed `alone`
(without their own), and the files with `tests`. It runs only if it is named.

`[tool.roll.pythons]` names the `versions` of Python besides that of the workspace. `python-VERSION` is a peer with all
packages but without engines. If nothing is named, each that this host has runs the tests of `brief`; if it is named,
those of `tests`.

The others run with `ROLL_CONFORMANCE=full`: what is not installed is a failure, and nothing is left out to save time.
Where all engines are tested, one that the workspace's environment has runs what `./run test` leaves out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from environments import REPOSITORY, environment, find_python
from packaging.requirements import Requirement

TOOLS = ("pytest", "hypothesis")
"""Beginnings of the names, among the workspace's development dependencies, of what runs tests."""


OLDEST = "-oldest"
"""End of the name of an engine in the oldest version that our package supports."""
NEWEST = "-newest"
"""End of the name of an engine in the newest version, which needs a newer Python than the workspace's."""


def main(arguments: list[str]) -> int:
    """0 if the tests of all chosen engines pass, 2 if one of the names is not an engine's.

    The next environment is made while tests run.
    """
    first_option = next((at for at, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    names, options = arguments[:first_option], arguments[first_option:]
    engines, peers = find_engines(), find_peers()
    for name in names:
        if name not in (*engines, *peers):
            print(f"there is no engine {name!r}; there are {', '.join((*engines, *peers))}", file=sys.stderr)
            return 2
    # First those that need no environment of their own: the first other one is made in the meantime.
    unnamed = [name for name in engines if not name.endswith((OLDEST, NEWEST))]
    chosen = names or [*sorted(unnamed, key=lambda name: not in_workspace(engines[name])), *found_pythons(peers)]
    failed = []
    ahead = ThreadPoolExecutor(max_workers=1)
    try:
        pythons = [
            ahead.submit(engine_python, name, engines[name])
            if name in engines
            else ahead.submit(peer_python, name, peers[name])
            for name in chosen
        ]
        for name, python in zip(chosen, pythons, strict=True):
            if name in engines:
                tests = [str(module) for module in longest_first(engines[name] / "tests")]
            else:
                tests = peers[name]["tests" if names else "brief"]
            variables = {} if "python" in peers.get(name, {}) else {"ROLL_CONFORMANCE": "full"}
            if not names and name in engines and in_workspace(engines[name]):
                variables["ROLL_LEFT_OUT"] = "1"
            if not test(name, python.result(), [*tests, *options], variables):
                failed.append(name)
    finally:
        ahead.shutdown(cancel_futures=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def longest_first(tests: Path) -> list[Path]:
    """The modules of a folder with tests, those of whole runs first: no worker of xdist runs them alone at last."""
    return sorted(tests.rglob("test_*.py"), key=lambda module: (not module.stem.endswith("_runs"), module))


def find_engines() -> dict[str, Path]:
    """Folders of the packages that bring an engine, by the engine's name."""
    found = {}
    for file in sorted((REPOSITORY / "packages").glob("*/pyproject.toml")):
        name = file.parent.name.rpartition("-")[2]
        if table := engine_table(read(file)):
            found[name] = file.parent
        if "oldest" in table:
            found[name + OLDEST] = file.parent
        if "newest-python" in table:
            found[name + NEWEST] = file.parent
    return found


def find_peers() -> dict[str, dict[str, Any]]:
    """Tables of the peers, by name; those of other versions of Python have the key `python`."""
    table = read(REPOSITORY / "pyproject.toml")["tool"]["roll"]
    pythons = {f"python-{version}": {"python": version, **table["pythons"]} for version in table["pythons"]["versions"]}
    return {**table["peers"], **pythons}


def found_pythons(peers: dict[str, dict[str, Any]]) -> list[str]:
    """Peers of versions of Python that this host has."""
    found = []
    for name, peer in peers.items():
        if "python" in peer and find_python(peer["python"]) is None:
            print(f"== {name}: skipped, uv finds no Python {peer['python']}", file=sys.stderr)
        elif "python" in peer:
            found.append(name)
    return found


def peer_python(name: str, peer: dict[str, Any]) -> Path:
    """The interpreter of a peer's environment: its `packages` of ours, by default all, the peer, pytest."""
    tools = [each for each in read(REPOSITORY / "pyproject.toml")["dependency-groups"]["dev"] if each.startswith(TOOLS)]
    packages = peer.get("packages") or sorted(file.parent.name for file in (REPOSITORY / "packages").glob("*/*.toml"))
    here = (word for package in packages for word in ("-e", f"./packages/{package}"))
    requirements = [*here, *peer["requirements"], *tools]
    return environment(f"{name}-tests", requirements, alone=peer.get("alone", []), python=peer.get("python"))


def engine_table(project: dict[str, Any]) -> dict[str, Any]:
    """`[tool.roll.engine]` of a `pyproject.toml`; empty if the package wraps no engine."""
    table: dict[str, Any] = project.get("tool", {}).get("roll", {}).get("engine", {})
    return table


def in_workspace(package: Path) -> bool:
    """Whether its engine is something that everyone needs, and so already here."""
    return bool(engine_table(read(package / "pyproject.toml")).get("workspace"))


def engine_python(name: str, package: Path) -> Path:
    """The interpreter of an engine's environment: the core, the plugin and those that need no engine as they stand
    here, the engine, pytest."""
    root = read(REPOSITORY / "pyproject.toml")
    pins = {key: root["tool"]["uv"].get(key) for key in ("constraint-dependencies", "exclude-newer")}
    tools = [each for each in root["dependency-groups"]["dev"] if each.startswith(TOOLS)]
    if in_workspace(package):
        return Path(sys.executable)
    apart = [folder for folder in find_engines().values() if not in_workspace(folder)]
    plain = [file.parent for file in sorted((REPOSITORY / "packages").glob("*/pyproject.toml"))]
    plain = [folder for folder in plain if folder not in apart]
    here = [f"./{folder.relative_to(REPOSITORY)}" for folder in plain]
    engine = engine_table(read(package / "pyproject.toml"))
    here.append(f"./{package.relative_to(REPOSITORY)}")
    oldest = {Requirement(each).name: each for each in engine.get("oldest", []) if name.endswith(OLDEST)}
    requirements, alone = (
        [oldest.get(Requirement(each).name, each) for each in engine.get(key, [])] for key in ("requirements", "alone")
    )
    return environment(
        name,
        [*(word for folder in here for word in ("-e", folder)), *requirements, *tools],
        alone=alone,
        remove=engine.get("remove", []),
        python=engine["newest-python"] if name.endswith(NEWEST) else None,
        despite=left_out(package),
        also=[pins, *(read(folder / "pyproject.toml")["project"] for folder in (*plain, package))],
    )


def left_out(package: Path) -> list[str]:
    """Dependencies of the package that the workspace leaves out and its tests need."""
    project = read(package / "pyproject.toml")
    names = engine_table(project).get("dependencies", [])
    return [each for each in project["project"]["dependencies"] if Requirement(each).name in names]


def test(name: str, python: Path, arguments: list[str], also: dict[str, str]) -> bool:
    """Whether the tests pass in their environment, with the variables `also`."""
    print(f"== {name}", file=sys.stderr, flush=True)
    # The environment's own programs (ninja, ray) come first: engines and workers look for them by name.
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    variables = {
        key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH")
    }
    variables |= {"PATH": path, **also}
    command = [str(python), "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=variables).returncode == 0


def read(file: Path) -> dict[str, Any]:
    """A TOML file."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
