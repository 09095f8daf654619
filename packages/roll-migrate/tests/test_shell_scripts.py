"""Shell scripts: words as bash itself expands them, and texts that are unknown without running programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import ConfigError
from roll_migrate.scripts import read_script
from roll_testing.errors import raises_error

CASES = (Path(__file__).parent / "shell_cases.txt").read_text(encoding="utf-8").split("===\n")
LAUNCH = """launch() { printf '%s\\0' "$@" >> "$LOG"; printf '\\1' >> "$LOG"; }\n"""


def read(text, folder, name="run.sh", **variables):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return read_script(file, {key.removeprefix("_"): value for key, value in variables.items()})


def launches(text, folder, **variables):
    """Words of each command `launch`."""
    result = []
    for command in read(text, folder, **variables).commands:
        name, *words = command.words
        if name.text == "launch":
            result.append([word.value("", word.text) for word in words])
    return result


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("case", [*CASES, "launch a=1 \\\n  b=2 \\", "launch a=1\\"])
def test_words_are_those_of_bash(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "run.sh").write_text(f"{LAUNCH}{case}")
    environment = {"HOME": os.path.expanduser("~"), "PATH": os.environ["PATH"], "LOG": str(log)}
    subprocess.run(["bash", "run.sh"], env=environment, capture_output=True, timeout=60, check=False)
    expected = [words.split("\0")[:-1] for words in log.read_text().split("\1")[:-1]]
    assert launches(case, tmp_path) == [[] if words == [""] else words for words in expected]


BRANCHES = {
    "if": 'if [ "$DEVICE" = npu ]; then n=16; else n=8; fi\nlaunch $n\n',
    "case": 'case "${DEVICE}" in\n gpu) n=8;;\n npu) n=16;;\nesac\nlaunch $n\n',
    "double brackets": "n=8\n\n[[ $DEVICE == npu ]] && n=16\nlaunch $n\n",
    "probe": "D=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}\n"
    "if [ $D = npu ]; then n=16; else n=8; fi; launch $n\n",
    "chain": "python3 -c 'import torch_npu' && DEVICE=npu || DEVICE=gpu\n"
    "if [ $DEVICE = npu ]; then n=16; else n=8; fi\nlaunch $n\n",
    "array": 'E=()\nif [ "$DEVICE" = npu ]; then E+=(16); else E+=(8); fi\nlaunch "${E[@]}"\n',
    "program": 'if [ "$DEVICE" = npu ]; then launch 16; else launch 8; fi\n',
}
LINES = {"chain": 1, "if": 1, "case": 1, "double brackets": 3, "probe": 2, "array": 2, "program": 1}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_is_followed_if_its_variable_is_set(name, tmp_path):
    assert launches(BRANCHES[name], tmp_path, DEVICE="gpu") == [["8"]]
    assert launches(BRANCHES[name], tmp_path, DEVICE="npu") == [["16"]]


@pytest.mark.parametrize("name", BRANCHES)
def test_unknown_branch_is_located(name, tmp_path):
    where = f"{tmp_path / 'run.sh'}:{LINES[name]}"
    with raises_error("ROLL-C024", "DEVICE", at=where):
        script = read(BRANCHES[name], tmp_path)
        words = [word for command in script.commands if command.words[0].text == "launch" for word in command.words]
        for word in words:
            word.value("", word.text)
        script.one([launch for launch in script.launches() if launch.texts[0] == "launch"], "launch")


def test_branch_without_effect_may_be_unknown(tmp_path):
    text = 'if ! ray status; then ray start --head; fi\nif [ -z "$X" ]; then echo "no X" >&2; exit 1; fi\nlaunch 1\n'
    assert launches(text, tmp_path) == [["1"]]


@pytest.mark.parametrize(
    "text", ["launch a=$X", "launch $X", 'launch "a=${X}/b"', "launch $((X * 2))", "Y=$X; launch $Y"]
)
def test_variable_from_elsewhere_is_unknown_until_set(text, tmp_path):
    with raises_error("ROLL-C024", "X"):
        launches(text, tmp_path)
    assert launches(text, tmp_path, X="3")


def test_environment_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("X", "secret")
    assert launches("launch ${X:-default}", tmp_path) == [["default"]]


def test_arguments_are_set_by_number(tmp_path):
    text = 'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nn=$1; out=$2; shift 2\nlaunch $n "$out" "$@"\n'
    assert read(text, tmp_path).end == f"{tmp_path / 'run.sh'}:1"
    assert launches(text, tmp_path, _1="8", _2="/tmp/x", _3="a.b=1") == [["8", "/tmp/x", "a.b=1"]]
    with raises_error("ROLL-C024", "$1"):
        launches("launch a=$1", tmp_path)


def test_variable_of_the_script_cannot_be_set_from_outside(tmp_path):
    with raises_error("ROLL-C015", "low", key="--set"):
        launches("low=0.2\nlaunch $low", tmp_path, low="0.1")
    # what it finds out by a program can
    text = "n=$(nvidia-smi -L | wc -l)\nlaunch $n"
    assert launches(text, tmp_path, n="4") == [["4"]]
    with raises_error("ROLL-C024", "nvidia-smi", "--set n=VALUE,"):
        launches(text, tmp_path)


def test_directory_of_the_script_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nlaunch "$ROOT" "$PWD/data" "$(pwd)"\n'
    expected = [str(tmp_path.parent), f"{tmp_path}/data", str(tmp_path)]
    assert launches(text, tmp_path) == [expected]


def test_date_is_that_of_the_import(tmp_path):
    ((text,),) = launches("launch run_$(date +%Y%m%d)_a", tmp_path)
    assert re.fullmatch(r"run_20\d{6}_a", text)


def test_sourced_file_is_followed_or_reported_missing(tmp_path):
    (tmp_path / "config.sh").write_text("lr=3e-6\n")
    text = 'source "$(dirname "$0")/config.sh"\nlaunch ${lr:-1e-6}\n'
    assert launches(text, tmp_path) == [["3e-6"]]
    (tmp_path / "config.sh").unlink()
    with raises_error("ROLL-C024", "config.sh"):
        launches(text, tmp_path)


def test_unknown_sourced_file_may_set_any_variable(tmp_path):
    with raises_error("ROLL-C024", "config.env"):
        launches('source "${SLURM_SUBMIT_DIR}/config.env"\nlaunch ${lr:-1e-6}\n', tmp_path)
    text = "source /usr/share/machine.sh\nsource ~/.bashrc\n. venv/bin/activate\nlaunch ${lr:-1e-6}\n"
    assert launches(text, tmp_path) == [["1e-6"]]


def test_words_keep_their_places(tmp_path):
    text = "A=(\n  a.b=1 \\\n  c.d=2\n)\nread -r -d '' B <<EOF\nx.y \\\n  --z 3\nEOF\nlaunch \\\n \"${A[@]}\" $B e=1\n"
    (command,) = read(text, tmp_path).commands
    places = [word.where.removeprefix(f"{tmp_path / 'run.sh'}:") for word in command.words]
    assert [word.text for word in command.words] == ["launch", "a.b=1", "c.d=2", "x.y", "--z", "3", "e=1"]
    assert places == ["9:1", "2:3", "3:3", "6:1", "7:3", "7:7", "10:15"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x=1\nif true; then", 2),
        ("launch 'a", 1),
        ("\nlaunch )", 2),
        ("a() { a; }\na", 1),
        ("while true; do x=1; done", 1),
        ("x=aaaaaaaaaa\nfor i in {1..99}; do x=$x$x; done\nlaunch $x", 1),
        ("launch " + "${x:-" * 100 + "}" * 100, 1),
        ("launch " + "$((" * 50, 1),
        ("((" * 29 + "a", 1),
    ],
)
def test_syntax_error_of_a_script_is_located(text, line, tmp_path):
    start = time.monotonic()
    with raises_error("ROLL-C020", at=f"{tmp_path / 'run.sh'}:{line}"):
        launches(text, tmp_path)
    assert time.monotonic() - start < 30


def test_reading_a_script_runs_no_program(tmp_path):
    read(f"touch {tmp_path}/a; x=$(touch {tmp_path}/b); launch `touch {tmp_path}/c` > {tmp_path}/d", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


PIECES = [
    "$X",
    "${X:-",
    "}",
    "$(",
    ")",
    "$((",
    "))",
    '"',
    "'",
    "`",
    "if",
    "then",
    "fi",
    "case",
    "in",
    "esac",
    ";;",
    "x=1",
    "[[",
    "]]",
]
PIECES += [
    "a.b=c",
    "\\\n",
    "\n",
    ";",
    "&&",
    "||",
    "|",
    "&",
    "<<EOF\n",
    "EOF\n",
    "{",
    "(",
    "do",
    "done",
    "for",
    "while",
    "launch",
    "#",
]
PIECES += [
    "${x/a/b}",
    "${#x}",
    "${x[@]}",
    "x=(",
    "x+=",
    "f()",
    ">",
    "2>&1",
    "\\",
    "$'",
    "~",
    "*",
    "!",
    "%",
    "date",
    "shift",
    "$1",
    "\0",
]


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from(PIECES), max_size=30), blanks=st.booleans())
def test_any_text_is_read_or_refused(words, blanks, tmp_path_factory):
    with suppress(ConfigError):
        read((" " if blanks else "").join(words), tmp_path_factory.getbasetemp(), "any.sh")
