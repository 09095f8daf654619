"""What a run would take, before anything starts: who sits where, how much memory each phase needs, what to change.

`make_plan` asks the same functions that a run asks; nothing here imports torch or Ray.
"""

from roll_core.runtime.planning.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
