"""`import roll_core as roll`: runs, checks and plans from Python."""

import asyncio
import os
import signal
import sys
import threading

import pytest
import yaml

import roll_core as roll
from roll_core.cli.main import main
from roll_core.errors import ContractError, MissingRequirementError, PluginError, PluginHookError, RunInterruptedError
from roll_core.runtime.records.record import read_record
from roll_core.runtime.records.tracking import read_metrics, repeatable
from roll_testing.errors import raises_error
from roll_testing.runs import Runs


@pytest.fixture
def sft(tmp_path, monkeypatch):
    """A config of two steps, as a mapping."""
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, "local").sft(max_steps=2)


class Recorded:
    """Notes the events, and calls `act` after each step."""

    def __init__(self, act=lambda step: None):
        self.events, self.act = [], act

    def roll_run_started(self, run):
        self.events.append("started")

    def roll_step_finished(self, run, step, metrics):
        self.events.append((step, metrics["train/loss"]))
        self.act(step)

    def roll_run_finished(self, run, error):
        self.events.append(type(error))


def located(error):
    return {(each.where, each.key, each.code) for each in error.value.problems}


def test_file_mapping_and_validated_config_train_as_the_command(sft, tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(sft), encoding="utf-8")
    assert main(["run", str(path), "max_steps=3"]) == 0
    command = read_metrics(tmp_path / "output" / "sft" / "latest" / "metrics.jsonl")
    assert [each["step"] for each in command] == [1, 2, 3]
    first = roll.run(path, ["max_steps=3"])
    validated = roll.check(sft, {"max_steps": 3}).config
    found = [first, roll.run(sft, {"max_steps": 3}), roll.run(validated)]
    for result in found:
        assert result.outcome == "finished"
        assert [repeatable(each) for each in result.history] == [repeatable(each) for each in command]
    assert len({each.run_dir.path for each in found}) == 3


def test_nested_and_dotted_overrides_are_merged_into_the_config(sft):
    overrides = {"sft_train": {"training_args": {"learning_rate": 0.5}}, "sft_train.training_args.warmup_steps": 1}
    role = roll.check(sft, overrides).config.sft_train
    assert role.training_args.learning_rate == 0.5
    assert role.training_args.warmup_steps == 1
    assert role.training_args.per_device_train_batch_size == 16


def test_errors_in_mappings_and_overrides_name_their_keys(sft, tmp_path):
    with pytest.raises(roll.ConfigError) as error:
        roll.check(sft | {"sede": 1, "seed": "x"})
    assert {("config", "sede", "ROLL-C010"), ("config", "seed", "ROLL-C013")} <= located(error)
    with pytest.raises(roll.ConfigError) as error:
        roll.run(sft | {"seed": object(), "exp_name": [object()]})
    assert located(error) == {("config", "seed", "ROLL-C013"), ("config", "exp_name.0", "ROLL-C013")}
    for overrides, key, code in [
        ({"sft_train.training_args.learning_rat": 1}, "sft_train.training_args.learning_rat", "ROLL-C010"),
        (["seed=x"], "seed", "ROLL-C013"),
        (["seed"], "seed", "ROLL-C025"),
        ({"": 1}, "", "ROLL-C025"),
        ({"seed": {1, 2}}, "seed", "ROLL-C013"),
        ({"seed": 1 << 20_000}, "seed", "ROLL-C013"),
        ({"output_dir": "\udcff"}, "output_dir", "ROLL-C013"),
        (["output_dir='\udcff'"], "output_dir", "ROLL-C013"),
        ([("seed", 1)], "('seed', 1)", "ROLL-C025"),
        ("seed=1", "seed=1", "ROLL-C025"),
    ]:
        with pytest.raises(roll.ConfigError) as error:
            roll.run(sft, overrides)
        assert located(error) == {("overrides", key, code)}, overrides
    with pytest.raises(roll.ConfigError) as error:
        roll.plan(sft, ["seed=x"])
    assert located(error) == {("overrides", "seed", "ROLL-C013")}
    with pytest.raises(roll.ConfigError) as error:
        roll.check(sft | {"defaults": ["other"]})
    assert located(error) == {("config", "defaults", "ROLL-C023")}
    with pytest.raises(roll.ConfigError) as error:
        roll.check(tmp_path / "missing.yaml")
    assert [each.code for each in error.value.problems] == ["ROLL-C020"]
    itself = {}
    itself["x"] = itself
    with pytest.raises(roll.ConfigError) as error:
        roll.check(itself)
    assert [each.code for each in error.value.problems] == ["ROLL-C021"]
    assert not (tmp_path / "output").exists()


def test_missing_file_in_a_mapping_is_located_if_checked(sft):
    sft["sft_train"]["data_args"] = {"file_name": "missing.jsonl"}
    with pytest.raises(roll.ConfigError) as error:
        roll.check(sft)
    assert ("config", "sft_train.data_args.file_name", "ROLL-D001") in located(error)
    assert roll.check(sft, files=False).sources == ()


def test_interpolations_and_escaped_references_keep_their_value(sft):
    checked = roll.check(sft | {"exp_name": "${pipeline}-${seed}", "output_dir": "\\${seed}"}, ["seed=8"]).config
    assert (checked.exp_name, checked.output_dir) == ("sft-8", "${seed}")
    assert roll.check(checked).config == checked


def test_a_plan_has_places_memory_and_whether_the_run_fits(sft):
    assert roll.plan(sft, host_memory_gib=64).fits
    tight = roll.plan(sft, host_memory_gib=0.01)
    assert not tight.fits
    assert tight.plan.over > 0


def test_a_plan_needs_roll_tools(sft, monkeypatch):
    monkeypatch.setitem(sys.modules, "roll_tools.planning", None)
    monkeypatch.delattr(roll, "plan", raising=False)
    with raises_error(MissingRequirementError, "roll-tools"):
        roll.plan(sft)


def test_callbacks_get_the_events_of_their_run_only(sft):
    callback = Recorded()
    result = roll.run(sft, callbacks=[callback])
    losses = [(int(each["step"]), each["train/loss"]) for each in result.history]
    assert callback.events == ["started", *losses, type(None)]
    roll.run(sft)
    assert len(callback.events) == 4


class Misspelt:
    def roll_step_finish(self, run, step, metrics): ...


class TooFew:
    def roll_step_finished(self, step): ...


class Deferred:
    async def roll_step_finished(self, run, step, metrics):
        raise AssertionError


@pytest.mark.parametrize("callback", [object(), Recorded, Misspelt(), TooFew(), Deferred()])
def test_a_wrong_callback_is_refused_before_the_run(sft, tmp_path, callback):
    with pytest.raises(ContractError) as error:
        roll.run(sft, callbacks=[callback])
    assert error.value.exit_code == 2
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("raised", [ValueError("disk"), SystemExit(0)])
def test_a_callback_that_raises_ends_the_run_with_its_name(sft, tmp_path, raised):
    def fail(step):
        raise raised

    with pytest.raises(PluginHookError, match="Recorded") as error:
        roll.run(sft, callbacks=[Recorded(fail)])
    run = tmp_path / "output" / "sft" / "001"
    assert read_record(run / "run.json")["outcome"] == "failed"
    assert str(run) in error.value.__notes__[0]


def test_a_sys_exit_of_a_part_becomes_an_error(sft, monkeypatch):
    def leave(self, run):
        raise SystemExit(0)

    monkeypatch.setattr("roll_core.pipelines.sft.SFTPipeline.prepare", leave)
    with pytest.raises(PluginError):
        roll.run(sft)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_an_interrupt_in_a_callback_leaves_a_run_that_resumes(sft, in_a_loop):
    sft |= {"max_steps": 3, "save_steps": 1}
    whole = roll.run(sft | {"exp_name": "whole"})

    def interrupt(step):
        if step == 2:
            raise KeyboardInterrupt

    async def cell():
        return roll.run(sft, callbacks=[Recorded(interrupt)])

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if in_a_loop else roll.run(sft, callbacks=[Recorded(interrupt)])
    resumed = roll.run(sft, {"resume_from_checkpoint": True})
    assert [each["train/loss"] for each in resumed.history] == [each["train/loss"] for each in whole.history]


def test_notebook_run_has_its_own_loop_and_prints_every_step(sft, capsys):
    async def cell():
        result = roll.run(sft)
        await asyncio.sleep(0)
        return result

    result = asyncio.run(cell())
    assert result.outcome == "finished"
    assert capsys.readouterr().out.count("step=") == 2
    assert [repeatable(each) for each in result.history] == [repeatable(each) for each in roll.run(sft).history]


@pytest.fixture
def default_sigint():
    """Python's handler: a shell starts background commands with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_ctrl_c_ends_the_run_and_restores_the_handlers(sft, tmp_path, default_sigint, in_a_loop):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    asked = []

    def ask(step):
        if not asked:
            asked.append(threading.current_thread().name)
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        # asyncio.run handles SIGINT itself; a notebook's kernel does not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return roll.run(sft | {"max_steps": 5000}, callbacks=[Recorded(ask)])

    with pytest.raises(RunInterruptedError):
        asyncio.run(cell()) if in_a_loop else roll.run(sft | {"max_steps": 5000}, callbacks=[Recorded(ask)])
    assert (asked == ["roll-run_0"]) == in_a_loop
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert read_record(tmp_path / "output" / "sft" / "latest" / "run.json")["outcome"] == "interrupted"


def test_package_lists_its_lazy_attributes_and_refuses_others():
    assert {"run", "check", "plan", "RunResult"} <= set(dir(roll))
    with pytest.raises(AttributeError):
        roll.ruun  # noqa: B018
