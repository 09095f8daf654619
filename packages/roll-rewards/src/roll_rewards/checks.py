"""Check of `roll-core doctor`: isolation of untrusted programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import RewardFailure
from roll_core.spec.diagnostics import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

WANTED = "Landlock and seccomp (Linux 5.13)"


def sandbox(context: CheckContext) -> Iterator[CheckResult]:
    """Check that programs of responses can be isolated, by attempts to escape. An error only if the config needs it."""
    from roll_rewards.sandbox import Limits, Sandbox, probe

    rewards = getattr(context.config, "rewards", {})
    needed = any(
        config.reward == "code" and not (config.sandbox_command or config.sandbox_url) for config in rewards.values()
    )
    problem = probe()
    if problem:
        yield CheckResult(
            level="error" if needed else "note",
            found=problem,
            wanted=WANTED,
            remedy="set sandbox_command of the reward to a container's, or run on a newer kernel",
        )
        return
    box = Sandbox(Limits())
    try:
        state = box.layers()
    except RewardFailure as failure:  # the probe succeeded a moment ago
        yield CheckResult(level="warning", found=str(failure), wanted=WANTED, remedy="run roll-core doctor again")
        return
    finally:
        box.close()
    missing = "".join(f"; without {layer}" for layer in state["missing"])
    yield CheckResult(level="note" if missing else "ok", found=", ".join(state["layers"]) + missing, wanted=WANTED)
