"""C++ and CUDA sources of a package, compiled on first use and cached, or compiled ahead and shipped in its wheel.

    Extension -> key (sources, flags, torch, processor) -> shipped? -> lock -> compile in a subprocess -> cache

torch's `cpp_extension` compiles, in a subprocess. The subprocess has ninja on its path, its output is captured, and it
may be killed at any time. Only complete directories are moved into the cache. The lock is released when its owner
exits; torch's own lock file would remain and block all later processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from roll_core.errors import ExtensionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 600.0
"""Timeout for one extension, including the wait for another process that compiles it."""
CACHE_VARIABLE = "TORCH_EXTENSIONS_DIR"
"""Environment variable of torch with the cache directory of extensions."""
LAST_LINES = 25
"""Number of lines of compiler output in an error message."""
AHEAD = "compiled"
"""Directory next to the first source, with libraries compiled when the package's wheel was built."""
ARCHITECTURES_VARIABLE = "TORCH_CUDA_ARCH_LIST"
"""Environment variable of torch with the GPUs that CUDA sources are compiled for: `8.0;9.0+PTX`."""
FORCE_VARIABLE = "FORCE_CUDA"
"""Environment variable; `1` compiles CUDA sources on a host without a GPU, for other hosts."""
COMMON_ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0+PTX"
"""Compute capabilities used if no GPU is present and none is named: Turing to Hopper, and later ones by PTX."""
OLDEST_CAPABILITY = 6.0
"""Minimum compute capability (Pascal)."""
SURVEY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Sources that are compiled to one shared library.

    Its functions are called through `ctypes`, or it registers torch operators.
    """

    name: str
    """Name of the library; a C identifier."""
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    """Headers that the sources include by file name; may belong to another package."""
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    native: bool = False
    """Compile for exactly this host's processor (`-march=native`)."""

    def library(self) -> Path:
        """Path of the shared library, compiled if necessary, which takes seconds to minutes.

        A library shipped with the package is used if it fits this torch and processor. Otherwise the library comes from
        the cache or is compiled. Raises `ExtensionError`, with the compiler's output, if this fails.
        """
        if (shipped := self.ahead_folder() / self.ahead_name() / f"{self.name}.so").is_file():
            return shipped
        if any(self.ahead_folder().glob(f"{self.name}-*")):
            log.info("extension %s was shipped for another torch or processor: compiling it on this host", self.name)
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
                f"extension {self.name}: another process did not finish compiling it within {BUILD_TIMEOUT_S:.0f} s"
            ) from error
        except OSError as error:
            raise ExtensionError(
                f"extension {self.name}: cannot write to {folder.parent}: {error}; set {CACHE_VARIABLE} to a writable"
                " directory"
            ) from error
        return library

    def load(self) -> ctypes.CDLL:
        """Load the shared library. Raises `ExtensionError`, also if `library` succeeds but loading fails."""
        path = self.library()
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise ExtensionError(f"extension {self.name}: {path} cannot be loaded: {error}") from error

    def build_ahead(self, folder: Path) -> Path:
        """Compile into a directory that becomes `AHEAD` next to the first source in a wheel. Returns the library.

        Raises `ExtensionError` like `library`.
        """
        made = folder / self.ahead_name()
        made.mkdir(parents=True)
        self._compile(made)
        return made / f"{self.name}.so"

    def ahead_folder(self) -> Path:
        """Directory of libraries shipped with the package."""
        return self.sources[0].parent / AHEAD

    def ahead_name(self) -> str:
        """Subdirectory of a shipped library. Its name does not depend on the compiler."""
        return f"{self.name}-{self._digest()}"

    def key(self) -> str:
        """Cache key: a digest of everything that the library depends on."""
        return self._digest(os.environ.get("CXX", ""), os.environ.get("CC", ""))

    @property
    def has_cuda_sources(self) -> bool:
        """True if nvcc or hipcc is needed."""
        return any(source.suffix == ".cu" for source in self.sources)

    def _digest(self, *compilers: str) -> str:
        import torch

        parts = [torch.__version__, str(torch.version.cuda), str(torch.version.hip), platform.machine(), *self.cflags]
        parts += [*self.cuda_cflags, *self.ldflags, *compilers]
        if self.native:
            parts.append(_processor())
        if self.has_cuda_sources:
            parts += [f"{name}={value}" for name, value in _gpu_environment(self.name).items()]
        digest = hashlib.sha256(json.dumps(parts).encode())
        for source in (*self.sources, *self.headers):
            digest.update(source.read_bytes())
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
        include = dict.fromkeys(f"-I{source.parent}" for source in self.headers)
        task = {
            "name": self.name,
            "sources": [str(source) for source in self.sources],
            "extra_cflags": ["-O3", "-std=c++17", *include, *native, *self.cflags],
            "extra_cuda_cflags": list(self.cuda_cflags),
            "extra_ldflags": list(self.ldflags),
            "build_directory": str(folder),
        }
        # ninja is installed next to this interpreter, whose directory may not be on the path.
        env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the extension may be the backend that torch would load
        if self.has_cuda_sources:
            env |= _gpu_environment(self.name)
        command = [sys.executable, "-m", "roll_kernels.extensions", json.dumps(task)]
        try:
            done = subprocess.run(
                command,
                env=env,
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
            output = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
            raise ExtensionError(f"extension {self.name}: compilation failed:\n{output}")


def declare(loaded: ctypes.CDLL, functions: Mapping[str, Sequence[Any]], *, result: Any = None) -> ctypes.CDLL:
    """Set the argument types of a library's `functions`, which all return `result`. Returns the library."""
    for name, arguments in functions.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = list(arguments), result
    return loaded


def cache_folder() -> Path:
    """Cache directory of compiled extensions."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / "roll"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "roll" / "extensions"


def cuda_architectures(name: str) -> str:
    """GPUs for which an extension's CUDA sources are compiled, in the format of `TORCH_CUDA_ARCH_LIST`.

    Unless unset or `native`, this variable takes precedence over the capabilities that nvidia-smi reports. Without a
    GPU, `FORCE_CUDA=1` is required; `COMMON_ARCHITECTURES` is then the default.

    Raises `ExtensionError` if there is nothing to compile for, or if the GPUs are too old.
    """
    here, chosen = _capabilities(), os.environ.get(ARCHITECTURES_VARIABLE, "")
    if not here and os.environ.get(FORCE_VARIABLE, "0") in ("", "0"):
        raise ExtensionError(
            f"extension {name}: nvidia-smi reports no GPU on this host. To compile for other hosts, set"
            f" {FORCE_VARIABLE}=1, and {ARCHITECTURES_VARIABLE} to the compute capabilities of their GPUs, '8.0;9.0'"
        )
    if chosen and chosen != "native":
        return chosen
    if not here:
        return COMMON_ARCHITECTURES
    if min(map(float, here)) < OLDEST_CAPABILITY:
        raise ExtensionError(
            f"extension {name}: the GPUs have compute capability {', '.join(here)}, at least {OLDEST_CAPABILITY} is"
            f" required: hide older GPUs (CUDA_VISIBLE_DEVICES), or set {ARCHITECTURES_VARIABLE}"
        )
    return ";".join(here)


def _gpu_environment(name: str) -> dict[str, str]:
    """Environment variables that set the GPUs for torch's builder. Raises `ExtensionError` if it cannot compile."""
    import torch

    if torch.version.hip:
        return {"PYTORCH_ROCM_ARCH": os.environ.get("PYTORCH_ROCM_ARCH", "")}
    if not torch.version.cuda:
        raise ExtensionError(
            f"extension {name} has CUDA sources, but torch {torch.__version__} is built without CUDA: install a build"
            " with CUDA"
        )
    return {ARCHITECTURES_VARIABLE: cuda_architectures(name)}


@lru_cache(maxsize=1)
def _capabilities() -> tuple[str, ...]:
    """Compute capabilities of this host's GPUs, such as `8.0`, queried without creating a context on them."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SURVEY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    capabilities = {line.strip() for line in done.stdout.splitlines() if done.returncode == 0}
    return tuple(sorted((capability for capability in capabilities if re.fullmatch(r"\d+\.\d", capability)), key=float))


@lru_cache(maxsize=1)
def _processor() -> str:
    """Instruction set of the processor. Home directories may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile_task(task: str) -> None:
    """Compile an extension in this process. On failure, exit with the reason as the last output."""
    import warnings

    warnings.simplefilter("ignore")
    from torch.utils import cpp_extension

    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        sys.exit(f"no C++ compiler {compiler} was found: install g++ or clang++, or set CXX")
    try:
        cpp_extension.load(**json.loads(task), is_python_module=False)
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":  # the subprocess of `Extension._compile`
    _compile_task(sys.argv[1])
