"""Sources compiled on first use: once, by the first process, and with readable failures."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from filelock import FileLock

from roll_core.errors import ExtensionError
from roll_kernels import extensions
from roll_kernels.extensions import Extension
from roll_testing.errors import raises_error

HOLDER = """
import sys, time
from filelock import FileLock
FileLock(sys.argv[1]).acquire()
print(flush=True)
time.sleep(60)
"""
BUILDER = """
import sys, time
from pathlib import Path
from roll_kernels.extensions import Extension

def compile(made, folder):
    time.sleep(0.5)
    (folder / "answer.so").write_text("")

Extension._compile = compile
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


@pytest.fixture
def pretended(monkeypatch):
    """Instead of compiling, writes a library that cannot be loaded: for tests of where libraries are kept."""
    monkeypatch.setattr(Extension, "_compile", lambda made, folder: (folder / f"{made.name}.so").write_text(""))


def extension(source, answer=42):
    return Extension(name="answer", sources=(source,), cflags=(f"-DANSWER={answer}",))


@pytest.mark.slow(ci=True)
def test_a_library_is_compiled_once_for_each_content_and_flag(source, monkeypatch):
    first, other = extension(source).library(), extension(source, 7).library()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert ctypes.CDLL(str(other)).answer() == 7
    monkeypatch.setattr(Extension, "_compile", None)  # whoever compiles now fails
    assert extension(source).library() == first
    source.write_text(GOOD + "// another\n")
    with pytest.raises(TypeError):
        extension(source).library()


@pytest.mark.slow(ci=True)
def test_compiler_error_is_reported(source):
    source.write_text('extern "C" int answer() { return no_such_thing; }\n')
    with raises_error(ExtensionError, "no_such_thing"):
        extension(source).library()
    source.write_text(GOOD)
    assert extension(source).library().is_file()


@pytest.mark.slow(ci=True)
def test_without_a_compiler_it_says_so(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises_error(ExtensionError, "no-such-compiler"):
        extension(source).library()


def test_a_folder_that_cannot_be_written_is_named(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with raises_error(ExtensionError, "TORCH_EXTENSIONS_DIR"):
        extension(source).library()


@pytest.mark.usefixtures("pretended")
def test_killed_build_releases_its_lock(source):
    made = extension(source)
    lock = f"{extensions.cache_folder()}/answer-{made.key()}.lock"
    os.makedirs(extensions.cache_folder())
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        holder.kill()
    assert made.library().is_file()


def test_timeout_of_a_concurrent_build_is_an_error(source, monkeypatch):
    made = extension(source)
    os.makedirs(extensions.cache_folder())
    monkeypatch.setattr(extensions, "BUILD_TIMEOUT_S", 0.1)
    lock = FileLock(f"{extensions.cache_folder()}/answer-{made.key()}.lock")
    with lock, raises_error(ExtensionError, "answer", "0"):
        made.library()


@pytest.mark.slow(ci=True)
def test_concurrent_builds_compile_once(source):
    both = [subprocess.Popen([sys.executable, "-c", BUILDER, str(source)], stdout=subprocess.PIPE) for _ in range(2)]
    first, second = (each.communicate()[0] for each in both)
    assert first == second
    assert first.strip()


# -- compiled ahead


def test_a_library_that_came_with_the_package_is_taken(source, monkeypatch):
    made = extension(source)
    shipped = made.build_ahead(made.ahead_folder())
    monkeypatch.setattr(Extension, "_compile", None)  # whoever compiles now fails
    monkeypatch.setenv("CXX", "another-compiler")
    assert made.library() == shipped
    assert ctypes.CDLL(str(shipped)).answer() == 42


@pytest.mark.parametrize("changed", ["source", "flags", "torch"])
@pytest.mark.usefixtures("pretended")
def test_shipped_library_of_another_build_is_ignored(source, changed, monkeypatch):
    made = extension(source)
    shipped = made.build_ahead(made.ahead_folder())
    if changed == "source":
        source.write_text(GOOD + "// another\n")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "0.1")
    library = extension(source, 7 if changed == "flags" else 42).library()
    assert library.is_relative_to(extensions.cache_folder())
    assert shipped.is_file()


# -- CUDA sources


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Sets what nvidia-smi says of the GPUs' capabilities."""
    for name in ("TORCH_CUDA_ARCH_LIST", "FORCE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def say(lines, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\nexit {code}\n")
        program.chmod(0o755)
        extensions._capabilities.cache_clear()

    say("NVIDIA-SMI has failed because it could not communicate with the driver.\\n", 9)
    yield say
    extensions._capabilities.cache_clear()


def test_architectures_are_those_of_the_gpus(gpus):
    gpus("9.0\\n8.0\\n9.0\\n10.0\\n")
    assert extensions.cuda_architectures("fast") == "8.0;9.0;10.0"


def test_architectures_that_are_named_count(gpus, monkeypatch):
    gpus("9.0\\n")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    assert extensions.cuda_architectures("fast") == "8.0+PTX"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert extensions.cuda_architectures("fast") == "9.0"


def test_without_a_gpu_it_takes_force_cuda(gpus, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    with raises_error(ExtensionError, "GPU", "FORCE_CUDA=1"):
        extensions.cuda_architectures("fast")
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert extensions.cuda_architectures("fast") == "9.0"
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert extensions.cuda_architectures("fast") == extensions.COMMON_ARCHITECTURES


def test_gpus_older_than_pascal_are_refused(gpus):
    gpus("5.2\\n8.0\\n")
    with raises_error(ExtensionError, "5.2", "8.0", "6.0"):
        extensions.cuda_architectures("fast")


def test_library_key_depends_on_the_gpus(gpus, source):
    kernel = source.with_suffix(".cu")
    kernel.write_text(GOOD)
    made = Extension(name="answer", sources=(kernel,))
    keys = []
    for said in ("8.0", "9.0", "9.0", "8.0\\n9.0"):
        gpus(f"{said}\\n")
        keys.append(made.key())
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_a_torch_without_cuda_is_named(gpus, source, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    kernel = source.with_suffix(".cu")
    kernel.write_text(GOOD)
    with raises_error(ExtensionError, "CUDA"):
        Extension(name="answer", sources=(kernel,)).library()
