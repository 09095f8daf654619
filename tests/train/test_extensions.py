"""Sources compiled on first use: once, by whoever comes first, and with readable failures."""

import ctypes
import os
import subprocess
import sys

import pytest
from filelock import FileLock

from roll_core.errors import ExtensionError
from roll_core.modeling import extensions
from roll_core.modeling.extensions import Extension

HOLDER = """
import sys, time
from filelock import FileLock
FileLock(sys.argv[1]).acquire()
print(flush=True)
time.sleep(60)
"""
BUILDER = """
import sys
from pathlib import Path
from roll_core.modeling.extensions import Extension
print(Extension(name="answer", sources=(Path(sys.argv[1]),)).library().stat().st_ino)
"""
GOOD = """
#ifndef ANSWER
#define ANSWER 1
#endif
extern "C" int answer() { return ANSWER; }
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    path = tmp_path / "answer.cpp"
    path.write_text(GOOD)
    return path


def extension(source, answer=42):
    return Extension(name="answer", sources=(source,), cflags=(f"-DANSWER={answer}",))


def test_a_library_is_compiled_once_for_each_content_and_flag(source, monkeypatch):
    first, other = extension(source).library(), extension(source, 7).library()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert ctypes.CDLL(str(other)).answer() == 7
    monkeypatch.setattr(Extension, "_compile", None)  # whoever compiles now fails
    assert extension(source).library() == first
    source.write_text(GOOD + "// another\n")
    with pytest.raises(TypeError):
        extension(source).library()


def test_what_the_compiler_says_is_told(source):
    source.write_text('extern "C" int answer() { return no_such_thing; }\n')
    with pytest.raises(ExtensionError, match=r"(?s)answer: cannot be compiled here.*no_such_thing"):
        extension(source).library()
    source.write_text(GOOD)
    assert extension(source).library().is_file()


def test_without_a_compiler_it_says_so(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExtensionError, match="no C\\+\\+ compiler no-such-compiler; install one"):
        extension(source).library()


def test_a_folder_that_cannot_be_written_is_named(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(ExtensionError, match="set TORCH_EXTENSIONS_DIR"):
        extension(source).library()


def test_a_build_that_was_killed_keeps_nobody_waiting(source):
    made = extension(source)
    lock = f"{extensions.cache_folder()}/answer-{made.key()}.lock"
    os.makedirs(extensions.cache_folder())
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        holder.kill()
    assert made.library().is_file()


def test_one_that_waits_too_long_for_another_says_so(source, monkeypatch):
    made = extension(source)
    os.makedirs(extensions.cache_folder())
    monkeypatch.setattr(extensions, "BUILD_TIMEOUT_S", 0.1)
    lock = FileLock(f"{extensions.cache_folder()}/answer-{made.key()}.lock")
    with lock, pytest.raises(ExtensionError, match="another process"):
        made.library()


def test_two_at_once_compile_once(source):
    both = [subprocess.Popen([sys.executable, "-c", BUILDER, str(source)], stdout=subprocess.PIPE) for _ in range(2)]
    first, second = (each.communicate()[0] for each in both)
    assert first == second
    assert first.strip()
