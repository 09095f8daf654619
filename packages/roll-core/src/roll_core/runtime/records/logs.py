"""Logging of a run: to `log.txt`, warnings also to the console. Other libraries' messages are filtered."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.secrets import Redactor
from roll_core.errors import RunFileError
from roll_core.runtime.records.run_files import check_in_place, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OURS = ("roll", "__main__")
"""Prefixes of ROLL's and its plugins' logger names, such as `roll_core`, `roll_infer_vllm`."""
_CHATTY = frozenset(
    ("absl", "asyncio", "datasets", "filelock", "fsspec", "h5py", "httpcore", "httpx", "huggingface_hub", "jax",
     "matplotlib", "numba", "numexpr", "PIL", "tensorboard", "tensorflow", "torch", "transformers", "urllib3")
)  # fmt: skip
"""Libraries of which the file gets only warnings and errors."""
_OWN_HANDLERS = ("transformers", "datasets", "huggingface_hub", "vllm", "sglang")
"""Libraries that install handlers of their own, which print to stderr."""
_QUIET_ENVIRONMENT = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
"""Disables other progress bars, which would overwrite ROLL's. The user's own settings take precedence."""
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class RunLogging:
    """Log handlers of one run; see `run_logging`."""

    def __init__(self, file: _LogFile) -> None:
        self._file = file
        self._taken: list[tuple[logging.Logger, list[logging.Handler], bool]] = []

    def adopt(self) -> None:
        """Route the messages of `_OWN_HANDLERS` libraries to the run's log. Call it after importing one of them."""
        for name in _OWN_HANDLERS:
            library = logging.root.manager.loggerDict.get(name)
            if isinstance(library, logging.Logger) and (library.handlers or not library.propagate):
                self._taken.append((library, list(library.handlers), library.propagate))
                library.handlers.clear()
                library.propagate = True

    def check(self) -> None:
        """Raise `RunFileError` if a message could not be written, or if the file was deleted or replaced."""
        if self._file.error is not None:
            raise self._file.error
        check_in_place(self._file.stream, Path(self._file.baseFilename))

    def _give_back(self) -> None:
        for library, handlers, propagate in reversed(self._taken):
            library.handlers[:] = handlers
            library.propagate = propagate
        self._taken.clear()


@contextlib.contextmanager
def run_logging(log_file: Path, show: Callable[[str], None], redactor: Redactor | None = None) -> Iterator[RunLogging]:
    """Log to `log_file` and call `show` with messages for the console, one line each. Restores all settings on exit.

    The file gets all messages of `roll_core`, INFO and above of plugins and user modules, and other libraries'
    warnings. The console gets warnings of ROLL and its plugins, and errors of any library.
    """
    redactor = redactor or Redactor.of(os.environ)
    root, ours = logging.getLogger(), logging.getLogger("roll_core")
    level, our_level = root.level, ours.level
    with writing(log_file):
        file_handler = _LogFile(log_file, encoding="utf-8", errors="backslashreplace")
    file_handler.setFormatter(_Formatter(redactor, _FORMAT))
    file_handler.addFilter(
        lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] not in _CHATTY
    )
    console_handler = _Show(show)
    console_handler.setFormatter(_Brief(redactor))
    console_handler.addFilter(lambda record: record.levelno >= (logging.WARNING if _is_ours(record) else logging.ERROR))
    run = RunLogging(file_handler)
    handlers: list[logging.Handler] = [file_handler, console_handler]
    added = {name: value for name, value in _QUIET_ENVIRONMENT.items() if name not in os.environ}
    showed = warnings.showwarning
    logging.captureWarnings(True)
    captured = warnings.showwarning is not showed
    os.environ.update(added)
    root.setLevel(min(level, logging.INFO) if level else logging.INFO)
    ours.setLevel(logging.DEBUG)
    for handler in handlers:
        root.addHandler(handler)
    run.adopt()
    try:
        yield run
    finally:
        run._give_back()
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        ours.setLevel(our_level)
        for name in added:
            os.environ.pop(name, None)
        if captured:
            logging.captureWarnings(False)


class _LogFile(logging.FileHandler):
    """Stores the first disk error for `RunLogging.check` instead of printing a traceback."""

    error: RunFileError | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        try:
            with writing(Path(self.baseFilename)):
                raise
        except RunFileError as error:
            self.error = self.error or error
        except Exception:
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # flushing the buffer may fail
            super().close()


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.startswith(_OURS)


class _Formatter(logging.Formatter):
    """Formats log lines and redacts secrets."""

    def __init__(self, redactor: Redactor, fmt: str | None = None) -> None:
        super().__init__(fmt, datefmt="%Y-%m-%d %H:%M:%S")
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(super().format(record))


class _Brief(_Formatter):
    """Formats only level and message; the traceback is in the file."""

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(f"{record.levelname.lower()}: {record.getMessage()}")


class _Show(logging.Handler):
    """Passes messages to the console."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(self.format(record))
        except Exception:
            self.handleError(record)
