"""The strategies for platform `cpu`, as `megatron_cpu_train` and `megatron_cpu_infer`, and a reward: for runs that
start workers of their own."""

from __future__ import annotations

from dataclasses import replace

from roll_core.spec.hooks import hookimpl
from roll_strategy_megatron import plugin

ROLL_HOOK_API = 1


@hookimpl
def roll_train_strategies():
    for each in plugin.roll_train_strategies():
        yield replace(
            each,
            name=each.name.replace("megatron", "megatron_cpu"),
            target="megatron_on_cpu_plugin:Strategy",
            platforms=("cpu",),
        )


def __getattr__(name):
    if name != "Strategy":
        raise AttributeError(name)
    import megatron_on_cpu  # noqa: F401 - importing it is what counts

    from roll_strategy_megatron.strategy import MegatronStrategy

    return MegatronStrategy


def share_of_c(prompt, response, **row):
    """A reward that random answers earn a little of."""
    return response.count("c") / 8
