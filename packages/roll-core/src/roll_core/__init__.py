"""ROLL: reinforcement-learning post-training for large language models, as a small core and plugins.

    import roll_core as roll

    result = roll.run("grpo.yaml", ["max_steps=20"])

Attributes are imported when they are first used (PEP 562). `__init__.pyi` has their types.
"""

__version__ = "0.1.0"

_LAZY = {
    "run": "roll_core.api",
    "check": "roll_core.api",
    "plan": "roll_tools.planning",
    "PlannedRun": "roll_tools.planning",
    "LiveMetrics": "roll_tools.live",
    "LoadedConfig": "roll_core.config",
    "RunResult": "roll_core.runtime.run.loop",
    "ConfigError": "roll_core.errors",
    "RollError": "roll_core.errors",
    "RunInterruptedError": "roll_core.errors",
}
"""Public names, and the module that each is imported from."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("roll_tools"):
            raise
        from roll_core.errors import MissingRequirementError, install_command

        raise MissingRequirementError(f"roll.{name} is part of roll-tools: {install_command('roll-tools')}") from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
