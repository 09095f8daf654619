"""Config schema of the reward `function`, a module of its own because most configs need no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import PositiveInt, RewardConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class FunctionConfig(RewardConfig):
    """`reward: function`: a user's Python function."""

    reward: Literal["function"]
    function: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
    """`module:function`, importable from the working directory: `f(prompt, response, **metadata)`."""
    signature: Literal["auto", "roll", "trl", "verl", "openrlhf"] = "auto"
    """Framework that the function was written for. `roll`: as above. `trl`: `f(completions, prompts, **columns)`, lists
    with one sample. `verl`: `f(data_source, solution_str, ground_truth, extra_info)`. `openrlhf`: `f(queries, prompts,
    labels)`, lists with one sample. `auto`: `trl` if it has a parameter `completions` or `completion_ids`, `verl` if it
    has `solution_str`, `openrlhf` if it has `queries` and `prompts`, otherwise `roll`."""
    label: str | None = None
    """Column for `labels` of `signature: openrlhf`, which each row needs. Default: the column `label`, or an empty text
    if a row has none."""
    isolation: Literal["process", "none"] = "process"
    """`process`: run the function in child processes, which are killed when it hangs. `none`: run it in the worker
    itself, for functions that need the worker's memory. A call that hangs without releasing the GIL then blocks the
    worker."""
    processes: PositiveInt = 2
    """Maximum number of processes per worker, with `isolation: process`; more are started as responses queue up."""
    memory_limit_mb: PositiveInt = 8192
    """Memory limit of one process, in MB, with `isolation: process`. A call that exceeds it fails."""

    @model_validator(mode="after")
    def _has_processes(self) -> FunctionConfig:
        # A saved config contains every default explicitly, so only other values count as given.
        fields = type(self).model_fields
        ignored = [key for key in ("processes", "memory_limit_mb") if getattr(self, key) != fields[key].default]
        if self.isolation == "none" and ignored:
            raise ValueError(f"{' and '.join(ignored)}: ignored with isolation: none, expected isolation: process")
        return self

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        from roll_rewards.user_function import check

        reason = check(self.function, columns, timeout_s, signature=self.signature, label=self.label)
        return {"function": f"{self.function} cannot be used: {reason}"} if reason else {}
