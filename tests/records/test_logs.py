import logging
import os
import warnings
from pathlib import Path

import pytest

from roll_core.config.secrets import Redactor
from roll_core.runtime.records.logs import run_logging


def state() -> object:
    root = logging.getLogger()
    return (
        list(root.handlers), root.level, logging.getLogger("roll_core").level, warnings.showwarning, dict(os.environ),
    )  # fmt: skip


def test_log_file_gets_all_our_messages_and_console_warnings(tmp_path: Path) -> None:
    shown: list[str] = []
    with run_logging(tmp_path / "log.txt", shown.append):
        ours = logging.getLogger("roll_core.runtime.some")
        ours.debug("a detail")
        ours.warning("größer als %d", 3)
        logging.getLogger("roll_infer_acme").warning("of a plugin")
        logging.getLogger("my_rewards").info("of the user's module")
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    for part in ("DEBUG   roll_core.runtime.some: a detail", "größer als 3", "of a plugin", "of the user's module"):
        assert part in text
    assert shown == ["warning: größer als 3", "warning: of a plugin"]


def test_messages_of_other_libraries_are_suppressed(tmp_path: Path) -> None:
    shown: list[str] = []
    with run_logging(tmp_path / "log.txt", shown.append):
        chatty = logging.getLogger("httpx.client")
        chatty.setLevel(logging.DEBUG)
        chatty.info("GET / 200")
        chatty.warning("slow")
        chatty.error("gone")
    chatty.setLevel(logging.NOTSET)
    text = (tmp_path / "log.txt").read_text()
    assert "GET" not in text
    assert "slow" in text
    assert shown == ["error: gone"]


def test_library_log_handlers_are_redirected_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("sglang")
    handler = logging.StreamHandler()
    library.addHandler(handler)
    library.propagate = False
    try:
        with run_logging(tmp_path / "log.txt", lambda line: None):
            library.warning("into the file")
        assert "into the file" in (tmp_path / "log.txt").read_text()
        assert capsys.readouterr().err == ""
        assert (library.handlers, library.propagate) == ([handler], False)
    finally:
        library.removeHandler(handler)
        library.propagate = True


def test_everything_is_as_before_afterwards_also_after_an_error(tmp_path: Path) -> None:
    before = state()
    for _ in range(3):
        with run_logging(tmp_path / "log.txt", lambda line: None) as run:
            run.adopt()
        with pytest.raises(ZeroDivisionError), run_logging(tmp_path / "log.txt", lambda line: None):
            _ = 1 / 0
        assert state() == before


def test_messages_are_logged_once_in_the_second_run(tmp_path: Path) -> None:
    for name in ("1.txt", "2.txt"):
        with run_logging(tmp_path / name, lambda line: None):
            logging.getLogger("roll_core").info("once")
    assert (tmp_path / "1.txt").read_text().count("once") == (tmp_path / "2.txt").read_text().count("once") == 1


def test_secrets_stay_out_of_file_and_console_also_in_tracebacks(tmp_path: Path) -> None:
    shown: list[str] = []
    with run_logging(tmp_path / "log.txt", shown.append, Redactor.of({"api_key": "supersecret99"})):
        try:
            raise ValueError("supersecret99 refused")
        except ValueError as error:
            logging.getLogger("roll_core").warning("cannot log in with %s", "supersecret99", exc_info=error)
    text = (tmp_path / "log.txt").read_text()
    assert "Traceback" in text
    assert "supersecret99" not in text
    assert shown == ["warning: cannot log in with <redacted>"]


def test_python_warnings_go_to_the_file(tmp_path: Path) -> None:
    shown: list[str] = []
    with run_logging(tmp_path / "log.txt", shown.append), warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old usage", stacklevel=1)
    logging.captureWarnings(False)
    assert "old usage" in (tmp_path / "log.txt").read_text()
    assert shown == []
