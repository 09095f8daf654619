"""Whose code raised an error: read from tracebacks, of this process and of workers."""

from __future__ import annotations

import pytest

from roll_core.errors import DataError, WorkerDiedError, WorkerError
from roll_core.plugins.attribution import raised_by
from roll_core.plugins.loader import Plugin
from roll_core.spec.providers import ExecutorProvider, InferProvider, PolicyLossProvider, RewardProvider, TrainProvider
from roll_testing.errors import mentions

PLUGIN = Plugin(
    package="roll-acme",
    version="1.2",
    entry_point="roll-acme",
    target="roll_acme.plugin",
    state="loaded",
    hooks=("roll_step_finished",),
    providers=(
        TrainProvider(name="acme_train", target="roll_acme.parts:Train", summary=""),
        TrainProvider(name="acme_infer", target="roll_acme.scoring:Scores", summary="", forward_only=True),
        InferProvider(name="acme_infer", target="roll_acme.parts:Infer", summary=""),
        PolicyLossProvider(name="acme_pg", target="roll_acme.losses:loss", summary=""),
    ),
)
CORE = Plugin(
    package="roll-core",
    version="1",
    entry_point="roll-core",
    target="roll_core.builtin.plugin",
    state="loaded",
    providers=(RewardProvider(name="rule", target="roll_core.builtin.rewards.rule:Rule", summary=""),),
)
SITE = "/venv/lib/python3.12/site-packages"
RUN_TRAIN = (f"{SITE}/roll_core/runtime/workers/train.py", 7, "update")
RUN_INFER = (f"{SITE}/roll_core/runtime/workers/infer.py", 7, "result")
RULE = (f"{SITE}/roll_core/builtin/rewards/rule.py", 9, "score")
TOOLKIT = (f"{SITE}/roll_modeling/task_model.py", 9, "forward")
TORCH = (f"{SITE}/torch/functional.py", 3, "einsum")
RUNTIME = (f"{SITE}/roll_core/runtime/rollout/recording.py", 5, "batch")


def frame(file, line, function):
    return (f"/home/me/acme/src/roll_acme/{file}", line, function)


def sent(*tracebacks):
    """An error of a worker with these tracebacks, first cause first."""
    blocks = [
        "Traceback (most recent call last):\n"
        + "".join(f'  File "{file}", line {line}, in {function}\n    ...\n' for file, line, function in frames)
        + "ValueError: no\n"
        for frames in tracebacks
    ]
    between = "\nThe above exception was the direct cause of the following exception:\n\n"
    return WorkerError("actor_train", 0, "node1", "update", "ValueError: no", between.join(blocks))


@pytest.mark.parametrize(
    ("frames", "part", "place"),
    [
        ([RUN_TRAIN, TOOLKIT, frame("losses.py", 12, "loss"), TORCH], "policy loss 'acme_pg'", "losses.py:12 in loss"),
        ([RUN_TRAIN, frame("parts.py", 3, "step")], "train strategy 'acme_train'", "parts.py:3 in step"),
        ([RUN_INFER, frame("parts.py", 4, "generate")], "infer strategy 'acme_infer'", "parts.py:4 in generate"),
        ([RUN_TRAIN, frame("scoring.py", 5, "score")], "forward-only strategy 'acme_infer'", "scoring.py:5 in score"),
        ([RUN_INFER, frame("deep/inside.py", 5, "go")], "code", "deep/inside.py:5 in go"),
        ([frame("plugin.py", 8, "roll_step_finished")], "hook roll_step_finished", "plugin.py:8 in roll_step_finished"),
    ],
)  # fmt: skip
def test_the_innermost_frame_of_a_plugin_names_its_part(frames, part, place):
    assert raised_by(sent(frames), [CORE, PLUGIN]) == f"{part} of roll-acme 1.2 (roll_acme/{place})"


@pytest.mark.parametrize("frames", [[frame("pipeline.py", 8, "step"), RUNTIME], [RUN_TRAIN, RULE, TORCH]])
def test_no_plugin_is_named_for_runtime_or_core_frames(frames):
    assert raised_by(sent(frames), [CORE, PLUGIN]) == ""


def test_the_first_cause_is_looked_at_first():
    error = sent([RUN_TRAIN, frame("losses.py", 12, "loss")], [RUN_TRAIN, frame("parts.py", 3, "step")])
    assert mentions(raised_by(error, [PLUGIN]), "'acme_pg'")
    later = DataError("later")
    later.__cause__ = error
    assert raised_by(later, [PLUGIN]).startswith("policy loss 'acme_pg'")


def test_executor_is_named_only_for_its_own_errors():
    swarm = ExecutorProvider(name="swarm", target="roll_swarm.executor:Swarm", summary="")
    plugin = Plugin(
        package="roll-swarm",
        version="1",
        entry_point="roll-swarm",
        target="roll_swarm.plugin",
        state="loaded",
        providers=(swarm,),
    )

    def raised(error):
        code = compile("def watch(error):\n    raise error\n", f"{SITE}/roll_swarm/executor.py", "exec")
        names = {}
        exec(code, names)
        with pytest.raises(type(error)):
            names["watch"](error)
        return raised_by(error, [CORE, plugin])

    assert raised(WorkerDiedError("actor_train", 0, "node1", "update", "it exited")) == ""
    assert raised(KeyError("slot")) == "executor 'swarm' of roll-swarm 1 (roll_swarm/executor.py:2 in watch)"


def test_no_plugin_is_named_without_traceback_or_plugins():
    assert raised_by(ValueError("no"), [CORE, PLUGIN]) == ""
    assert raised_by(sent([frame("losses.py", 12, "loss")]), [CORE]) == ""


@pytest.mark.parametrize("file", ["", "/", ".", "<string>"])
def test_generated_code_without_a_file_name_is_skipped(file):
    names = {}
    exec(compile("def loss():\n    return generated()\n", f"{SITE}/roll_acme/losses.py", "exec"), names)
    exec(compile("def generated():\n    return 1 / 0\n", file, "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        names["loss"]()
    assert mentions(raised_by(raised.value, [CORE, PLUGIN]), "'acme_pg'", "roll-acme")
