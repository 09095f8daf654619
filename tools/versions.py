"""`./run run python tools/versions.py [PACKAGE=VERSION...]`: versions of the packages, and the ranges between them.

Without arguments it says what disagrees, with exit code 1. With `roll-modeling=0.2.0` it sets a version and rewrites
every range that names the package, extras and the templates of `roll-core new` included. `all=0.2.0` sets every
package.

A range is `>=MAJOR.MINOR,<MAJOR.(MINOR+1)` of the version of the package that it names: before 1.0 a minor release may
change what others import.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^version = "(?P<version>[^"]+)"$', re.MULTILINE)
RANGE = re.compile(r'"(?P<name>roll-[a-z0-9-]+)(?P<extras>\[[a-z0-9,-]+\])?(?P<range>[<>=!~][^";]*)"')
IN_CODE = re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE)


def main(arguments: list[str]) -> int:
    """1 if something disagrees, 2 if a word is not PACKAGE=VERSION."""
    files = {file.parent.name: file for file in sorted((REPOSITORY / "packages").glob("*/pyproject.toml"))}
    versions = {name: tomllib.loads(file.read_text())["project"]["version"] for name, file in files.items()}
    for word in arguments:
        name, _, version = word.partition("=")
        if (name not in files and name != "all") or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
            print(f"found {word!r}, expected PACKAGE=X.Y.Z of all, {', '.join(files)}", file=sys.stderr)
            return 2
        versions |= dict.fromkeys(files, version) if name == "all" else {name: version}
    wrong = 0
    for name, file in files.items():
        wrong += settle(file, rewritten(file.read_text(), versions[name], versions), write=bool(arguments))
        code = file.parent / "src" / name.replace("-", "_") / "__init__.py"
        text = IN_CODE.sub(f'__version__ = "{versions[name]}"', code.read_text())
        wrong += settle(code, text, write=bool(arguments))
    for template in sorted(REPOSITORY.glob("packages/*/src/**/pyproject.toml")):  # of `roll-core new`
        wrong += settle(template, fitted(template.read_text(), versions), write=bool(arguments))
    return 1 if wrong else 0


def rewritten(text: str, version: str, versions: dict[str, str]) -> str:
    """A `pyproject.toml` with this version and with ranges that fit `versions`."""
    return fitted(VERSION.sub(f'version = "{version}"', text, count=1), versions)


def fitted(text: str, versions: dict[str, str]) -> str:
    """A `pyproject.toml` with ranges that fit `versions`."""

    def fitting(found: re.Match[str]) -> str:
        name, extras = found["name"], found["extras"] or ""
        return f'"{name}{extras}{range_of(versions[name])}"' if name in versions else found[0]

    return RANGE.sub(fitting, text)


def range_of(version: str) -> str:
    """`>=0.1,<0.2` of 0.1.3; `>=0.2.0rc1,<0.3` of a pre-release, which `>=0.2` leaves out."""
    major, minor = map(int, version.split(".")[:2])
    least = f"{major}.{minor}" if version.replace(".", "").isdigit() else version
    return f">={least},<{major}.{minor + 1}"


def settle(file: Path, text: str, *, write: bool) -> bool:
    """Write `text`, or say that the file has another; whether that remains wrong."""
    if file.read_text() == text:
        return False
    if write:
        file.write_text(text)
        return False
    print(f"{file.relative_to(REPOSITORY)} disagrees with the packages' versions", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
