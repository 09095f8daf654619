"""Windows: the steps of a trajectory that add noise and are trained. All other steps follow the ODE. Imports no torch.

A window is a function `(update, num_steps, seed) -> steps`. `update` counts the pipeline's steps from 0. Equal
arguments give equal steps, so that a resumed run continues with the same windows.

The last step ends at sigma 0. It is never in a window: noise there would remain in the image, and the std of `cps` is
0. Few early steps suffice for training, because they decide most of an image's composition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll_core.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Window(Protocol):
    """Chooses the trained steps of an update. Parameters after `seed` receive the options of the same names."""

    def __call__(self, update: int, num_steps: int, seed: int) -> Sequence[int]:
        """Step indices, ascending, each at least 0 and below `num_steps - 1`."""
        ...


def all_steps(update: int, num_steps: int, seed: int) -> Sequence[int]:
    """All steps but the last, as in Flow-GRPO (arXiv:2505.05470)."""
    return range(num_steps - 1)


def random(
    update: int, num_steps: int, seed: int, *, size: int = 2, step_range: Sequence[int] | None = None
) -> Sequence[int]:
    """`size` adjacent steps at a random place within `step_range`, as in Flow-GRPO-Fast and verl-omni's
    `sample_strategy: random`.

    Every place has the same probability. All rows of an update have the same window.
    """
    low, high = step_range or (0, num_steps - 1)
    start = int(np.random.default_rng([seed, update]).integers(low, high - size + 1))
    return range(start, start + size)


def progressive(
    update: int,
    num_steps: int,
    seed: int,
    *,
    size: int = 4,
    stride: int = 1,
    iters_per_group: int = 25,
    step_range: Sequence[int] | None = None,
) -> Sequence[int]:
    """`size` adjacent steps that move from noise to data: by `stride` steps every `iters_per_group` updates.

    Source: MixGRPO, arXiv:2507.21802. After the last place in `step_range`, the window starts at the first one
    again. The last place always touches the range's end, also if the stride does not divide the way to it.
    """
    low, high = step_range or (0, num_steps - 1)
    starts = [*range(low, high - size, stride), high - size]
    start = starts[update // iters_per_group % len(starts)]
    return range(start, start + size)


def checked_window(steps: Sequence[int], num_steps: int, target: str) -> tuple[int, ...]:
    """Return the steps that the function `target` chose. Raises `ContractError` if they are no window."""
    try:
        window = tuple(int(step) for step in steps)
    except (TypeError, ValueError) as error:
        raise ContractError(f"the window {target} returned {steps!r}, expected a sequence of integers") from error
    if not window or list(window) != sorted(set(window)) or window[0] < 0 or window[-1] >= num_steps - 1:
        raise ContractError(
            f"the window {target} returned the steps {list(window)}, expected ascending steps from 0 to"
            f" {num_steps - 2}: step {num_steps - 1} ends at sigma 0 and cannot be trained"
        )
    return window


def stop_step(update: int, num_steps: int, seed: int, stop_range: Sequence[int] | None) -> int:
    """Index of the last step of `refl`: uniform in `stop_range` [low, high), or the schedule's last one (None).

    All rows of an update stop at the same step, because programs call the module equally often on every rank.
    """
    if stop_range is None:
        return num_steps - 1
    return int(np.random.default_rng([seed, update]).integers(stop_range[0], stop_range[1]))
