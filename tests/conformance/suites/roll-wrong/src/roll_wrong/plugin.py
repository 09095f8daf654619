"""Offers the classes of the modules beside this one, by their names in snake case."""

import ast
import re
from dataclasses import replace
from pathlib import Path

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    ExecutorProvider,
    InferCapabilities,
    InferProvider,
    PlatformProvider,
    TrainCapabilities,
    TrainProvider,
)

ROLL_HOOK_API = 1


def parts(module):
    """Targets by name of the classes of a module, without those that begin with an underscore. Imports nothing."""
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    classes = [each.name for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name[0] != "_"]
    word = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    return {word.sub("_", name).lower(): f"roll_wrong.{module}:{name}" for name in classes}


WRONG, OPTIMIZERS, FLOWS, PLATFORMS = (parts(module) for module in ("wrong", "optimizers", "flows", "platforms"))
WRONG_ENGINES, ADAPTERS, EXECUTORS = (parts(module) for module in ("wrong_engines", "adapters", "executors"))
APART = ("hides_no_devices", "leaves_processes", "deaf_watch", "forgets_the_rank", "silent_exits", "loses_another")
IN_PROCESS = [name for name in EXECUTORS if name not in ("right_processes", *APART)]

ALONE = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    offload=True,
    portable_state=True,
    topk=True,
    gathered=True,
    weight_transports=("shared", "shm"),
)
TOGETHER = replace(ALONE, data_parallel=True)
FLOW = TrainCapabilities(
    tasks=("flow",),
    dtypes=("fp32",),
    data_parallel=True,
    gradient_checkpointing=True,
    lora=True,
    ema=True,
    module_programs=True,
)
SPECIAL = {
    **dict.fromkeys(OPTIMIZERS, replace(ALONE, offload=False, portable_state=False)),
    "right_together": TOGETHER,
    "mean_of_ranks": TOGETHER,
    "skips_alone": TOGETHER,
    "declares_too_much": replace(ALONE, tensor_parallel=True),
    "silent_without_topk": replace(ALONE, topk=False, gathered=False),
}
ENGINE = InferCapabilities(
    dtypes=("fp32",),
    sleeps=True,
    prompt_logprobs=True,
    prompt_topk=True,
    in_flight_update=True,
    weight_transports=("shared", "shm"),
)
IN_BF16 = replace(ENGINE, dtypes=("fp32", "bf16"))
SPECIAL_ENGINES = {
    "silent_prompt_logprobs": replace(ENGINE, prompt_logprobs=False, prompt_topk=False),
    "undeclared_seeds": replace(ENGINE, seeds=False),
    "name_of_nobody": replace(ENGINE, endpoint=True),
    "bias_lost_in_bf16": IN_BF16,
    **dict.fromkeys(ADAPTERS, replace(IN_BF16, lora=True)),
}


@hookimpl
def roll_executors():
    for name, target in EXECUTORS.items():
        summary = "For the tests of the kit for executors"
        yield ExecutorProvider(name=name, target=target, summary=summary, in_process=name in IN_PROCESS)


@hookimpl
def roll_platforms():
    yield PlatformProvider(name="wrong_board", target="roll_wrong.board:Board", summary="Pretends", priority=-1)
    for name, target in PLATFORMS.items():
        yield PlatformProvider(name=name, target=target, summary="For the tests of the kit for platforms", priority=-1)


@hookimpl
def roll_train_strategies():
    right = {"right": "roll_wrong.right:Right", "right_together": "roll_wrong.right:RightTogether"}
    for name, target in (right | WRONG | OPTIMIZERS).items():
        yield TrainProvider(
            name=name,
            target=target,
            config=f"roll_wrong.{'heavy' if name == 'heavy' else 'config'}:NoConfig",
            summary="For the tests of the conformance kit",
            capabilities=SPECIAL.get(name, ALONE),
            platforms=("wrong_board",),
        )
    for name, target in FLOWS.items():
        yield TrainProvider(
            name=name,
            target=target,
            config="roll_strategy_hf.config:HFTrainConfig",
            summary="For the tests of the conformance kit",
            capabilities=FLOW,
        )


@hookimpl
def roll_infer_strategies():
    right = {"right_engine": "roll_wrong.engine:RightEngine"}
    for name, target in (right | WRONG_ENGINES | ADAPTERS).items():
        yield InferProvider(
            name=name,
            target=target,
            config="roll_wrong.config:EngineConfig",
            summary="For the tests of the conformance kit",
            capabilities=SPECIAL_ENGINES.get(name, ENGINE),
            platforms=("cpu",) if name in SPECIAL_ENGINES else ("wrong_board",),
        )
