"""C++ and CUDA sources of a package, compiled on first use and kept.

    Extension -> key (sources, flags, torch, processor) -> lock -> compiled in a process of its own -> moved into place

torch's `cpp_extension` compiles. A process of its own gives it an environment with ninja on its path, keeps what it
prints, and may be killed half way: only complete folders are moved into the cache, and the lock dies with its owner
(torch's own lock file outlives it, and everyone after waits for ever).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from roll_core.errors import ExtensionError

BUILD_TIMEOUT_S = 600.0
"""For one extension, waiting for another process that compiles it included."""
CACHE_VARIABLE = "TORCH_EXTENSIONS_DIR"
"""torch's own variable for where extensions are kept."""
LAST_LINES = 25
"""Of what the compiler said, in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Sources that become one shared library. Its functions are called through `ctypes`, or it registers torch
    operators."""

    name: str
    """A C identifier."""
    sources: tuple[Path, ...]
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    native: bool = False
    """For the very processor that it is compiled on."""

    def library(self) -> Path:
        """The shared library, compiled if it is not there yet: seconds to minutes.

        Raises `ExtensionError`, with what the compiler said, if it cannot be.
        """
        folder = cache_folder() / f"{self.name}-{self.key()}"
        library = folder / f"{self.name}.so"
        if library.is_file():
            return library
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock", timeout=BUILD_TIMEOUT_S):
                if not library.is_file():
                    self._build(folder)
        except Timeout as error:
            raise ExtensionError(
                f"extension {self.name}: another process has been compiling it for {BUILD_TIMEOUT_S:.0f} s"
            ) from error
        except OSError as error:
            raise ExtensionError(
                f"extension {self.name}: cannot be kept in {folder.parent}: {error}; set {CACHE_VARIABLE} to a folder"
                " that can be written"
            ) from error
        return library

    def key(self) -> str:
        """Of what the library depends on."""
        import torch

        parts = [torch.__version__, str(torch.version.cuda), str(torch.version.hip), platform.machine(), *self.cflags]
        parts += [*self.cuda_cflags, *self.ldflags, os.environ.get("CXX", ""), os.environ.get("CC", "")]
        if self.native:
            parts.append(_processor())
        if self.cuda_cflags or any(each.suffix == ".cu" for each in self.sources):
            parts.append(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
        digest = hashlib.sha256(json.dumps(parts).encode())
        for each in self.sources:
            digest.update(each.read_bytes())
        return digest.hexdigest()[:16]

    def _build(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{self.name}-") as temporary:
            made = Path(temporary) / "built"
            made.mkdir()
            self._compile(made)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)

    def _compile(self, folder: Path) -> None:
        native = ("-march=native",) if self.native else ()
        task = {
            "name": self.name,
            "sources": [str(each) for each in self.sources],
            "extra_cflags": ["-O3", "-std=c++17", *native, *self.cflags],
            "extra_cuda_cflags": list(self.cuda_cflags),
            "extra_ldflags": list(self.ldflags),
            "build_directory": str(folder),
        }
        # ninja is beside this interpreter, which need not be on the path.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        command = [sys.executable, "-m", "roll_core.modeling.extension_build", json.dumps(task)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ExtensionError(f"extension {self.name}: not compiled within {BUILD_TIMEOUT_S:.0f} s") from error
        if done.returncode or not (folder / f"{self.name}.so").is_file():
            said = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
            raise ExtensionError(f"extension {self.name}: cannot be compiled here:\n{said}")


def cache_folder() -> Path:
    """Where compiled extensions are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / "roll"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "roll" / "extensions"


@lru_cache(maxsize=1)
def _processor() -> str:
    """What its instructions are: home directories are shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
