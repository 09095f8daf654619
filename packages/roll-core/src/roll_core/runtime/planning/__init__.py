"""Dry-run planning (`roll-core plan`): placement of workers, memory per phase, and config changes that make a run fit.

`make_plan` uses the same functions as a run. Nothing here imports torch or Ray.
"""

from roll_core.runtime.planning.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
