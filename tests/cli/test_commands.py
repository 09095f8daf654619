"""How the commands end: output, exit codes, and one message for a mistake."""

import os
import signal
import subprocess
import sys

import pytest

from roll_core import __version__
from roll_core.cli import main as cli
from roll_core.errors import RollError, RunInterruptedError
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import CommandProvider
from roll_testing.errors import mentions
from shared_tests.hf_plugins import HF_PACKAGES

SFT = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", HF_PACKAGES)
    (tmp_path / "run.yaml").write_text(SFT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    return "run.yaml"


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"roll-core {__version__}\n"
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_help_lists_commands_of_core_and_packages():
    listed = {line.split()[0] for line in cli.USAGE.split("commands:")[1].splitlines() if line.startswith("  ")}
    of_packages = load_registry().names(CommandProvider)
    assert listed == {*cli.COMMANDS, *of_packages}
    assert not set(cli.COMMANDS) & set(of_packages)


def test_plugin_command_gets_its_arguments_and_enabled_plugins(config, monkeypatch, capsys):
    """`envs` of roll-tools lists what the other plugins offer."""
    monkeypatch.setenv("ROLL_PLUGINS", f"{HF_PACKAGES},roll-pipeline-agentic")
    assert cli.main(["envs", "list"]) == 0
    assert "sokoban" in capsys.readouterr().out
    assert cli.main(["envs", "--disable-plugin", "roll-pipeline-agentic", "list"]) == 0
    assert "sokoban" not in capsys.readouterr().out


def test_command_of_a_missing_package_names_the_package(config, monkeypatch, capsys):
    monkeypatch.setenv("ROLL_PLUGINS", "")
    assert cli.main(["runs"]) == 2
    assert mentions(capsys.readouterr().err, "ROLL-P004", "roll-tools")


def test_no_command_and_an_unknown_one_are_mistakes(capsys):
    assert cli.main([]) == 2
    assert cli.main(["chekc"]) == 2
    assert mentions(capsys.readouterr().err, "check?")


def test_check_lists_the_roles_and_their_strategies(config, capsys):
    assert cli.main(["check", config]) == 0
    assert mentions(capsys.readouterr().out, "run.yaml: ok:", "sft_train hf_train × 1")


def test_check_counts_workers_from_the_slots(config, capsys):
    assert cli.main(["check", config, "sft_train.device_mapping=list(range(0,8))"]) == 0
    assert "sft_train hf_train × 8" in capsys.readouterr().out


def test_check_continues_after_a_bad_config_and_counts_errors(config, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text(SFT + "sede: 1\nsave_steps: -1\n")
    assert cli.main(["check", "bad.yaml", config, "absent.yaml"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("run.yaml: ok")
    assert "bad.yaml:5:1: ROLL-C010 sede" in shown.err
    assert "bad.yaml:6:13: ROLL-C013 save_steps" in shown.err
    assert mentions(shown.err, "absent.yaml: ROLL-C020")
    assert shown.err.endswith("3 mistakes\n")


@pytest.mark.parametrize("command", ["check", "run", "plan"])
def test_errors_show_no_known_or_environment_secrets(command, config, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "cafe0123cafe0123")
    for words in ("seed='sk-0123456789abcdef0123'", "executor=cafe0123cafe0123", "track_with=[cafe0123cafe0123]"):
        assert cli.main([command, config, words]) == 2
        shown = capsys.readouterr().err
        assert "<redacted>" in shown
        assert "0123" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "seed=3", "--disable-plugin", "acme", "--no-files", "~exp_name"],
        ["--disable-plugin", "acme", "seed=3", "run.yaml", "~exp_name", "--no-files"],
        ["seed=3", "--no-files", "--disable-plugin=acme", "~exp_name", "run.yaml"],
    ],
)
def test_configs_overrides_and_options_come_in_any_order(words, monkeypatch):
    from roll_core.cli import run

    seen = {}

    def record(configs, overrides, disabled, *, files):
        seen.update(configs=[str(each) for each in configs], overrides=overrides, disabled=disabled, files=files)
        return 0

    monkeypatch.setattr(run, "check_configs", record)
    assert cli.main(["check", *words]) == 0
    expected = {"configs": ["run.yaml"], "overrides": ["seed=3", "~exp_name"], "disabled": ["acme"], "files": False}
    assert seen == expected


def test_a_file_whose_path_has_an_equals_sign_is_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-4").mkdir()
    (tmp_path / "lr=1e-4" / "run.yaml").write_text(SFT)
    assert cli.main(["check", "--no-files", "lr=1e-4/run.yaml", f"exp_name={'x' * 300}"]) == 2
    assert "ROLL-C014 exp_name" in capsys.readouterr().err


def test_overrides_without_a_config_are_a_mistake(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "seed=3"])
    assert ended.value.code == 2
    assert mentions(capsys.readouterr().err, "config")


@pytest.mark.parametrize(("error", "code"), [(RollError("it broke"), 1), (RunInterruptedError("stopped"), 130)])
def test_roll_error_ends_with_its_message_and_exit_code(monkeypatch, capsys, error, code):
    def fail(_):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "run", fail)
    assert cli.main(["run", "x.yaml"]) == code
    assert capsys.readouterr().err == f"error: {error.code} {error}\n"


def test_ctrl_c_ends_with_130_and_without_a_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "run", interrupted)
    assert cli.main(["run", "x.yaml"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_unknown_error_shows_its_traceback_and_exits_with_1(tmp_path):
    script = (
        "import sys; from roll_core.cli import main\n"
        "def fail(_): raise ZeroDivisionError('ours')\n"
        "main.COMMANDS['run'] = fail\n"
        "sys.exit(main.main(['run', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: ours" in done.stderr


def test_a_mistake_in_run_ends_with_2_and_one_message(config):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from roll_core.cli.main import main; sys.exit(main())",
            "run",
            config,
            "seed=x",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert mentions(done.stderr, "ROLL-C013 seed", "'x'")


def test_a_reader_that_leaves_early_is_no_error(config):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from roll_core.cli.main import main; sys.exit(main())", "plugins", "-v"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


def test_missing_rows_end_a_run_before_heavy_imports(config, tmp_path):
    (tmp_path / "rows.jsonl").rename(tmp_path / "row.jsonl")
    ask = f"import sys\nfrom roll_core.cli.main import main\ncode = main(['run', {config!r}])\n"
    ask += "print('torch' in sys.modules)\nsys.exit(code)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("error: run.yaml:3:26: ROLL-D001 sft_train.data_args.file_name: ")
    assert "row.jsonl" in done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_override_without_value_or_config_shows_usage(command, config, capsys):
    for words, says in (
        ([config, "max_steps"], "max_steps=VALUE"),
        ([config, 300 * "a"], f"{300 * 'a'}=VALUE"),
        ([], "config file"),
        (["seed=3"], "config file"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, *words])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


BUSY = """
import os, sys, threading, torch
from roll_core.cli import main as cli

def multiply():
    a = torch.randn(1000, 1000)
    while True:
        a @ a

def interrupted():
    raise KeyboardInterrupt

def interrupted_in_exec():  # the interpreter notes that nothing handled it, and would end by SIGINT whatever follows
    exec("raise KeyboardInterrupt")

def returning():
    return 0

def failing():
    raise OSError("unexpected")

def run(words):
    threading.Thread(target=multiply, daemon=True).start()
    return end()

for end in (interrupted, interrupted_in_exec, returning, failing):  # each in a process that need not import torch again
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

cli.COMMANDS["run"] = run
sys.argv[1:] = ["run"]
cli.command_line()
"""


@pytest.mark.slow(ci=True)
def test_worker_thread_inside_torch_does_not_abort_at_exit():
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True)
    assert done.stdout.split() == ["130", "130", "0", "1"], done.stderr
    assert "terminate called" not in done.stderr


def test_sigterm_before_a_run_is_reported_and_exits_with_75(monkeypatch, capsys):
    from roll_core.cli import run

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, "run_configs", lambda *words, **options: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["run", "run.yaml"]) == 75
    assert "SIGTERM" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
