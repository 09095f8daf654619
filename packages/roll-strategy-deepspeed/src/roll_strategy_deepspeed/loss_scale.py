"""The loss scale in float16, which DeepSpeed's optimizers adapt during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a dynamic loss scale; a fixed one has only `cur_scale`."""


class LossScale:
    """Loss scale of one engine; inactive unless the model is float16 (which requires ZeRO stages 1 to 3)."""

    def __init__(self, engine: Any) -> None:
        scaler: Any = engine.optimizer.loss_scaler if engine.fp16_enabled() else None
        self._scaler = scaler
        if self._falls:
            # At the minimum scale, DeepSpeed would raise. Skip the step instead, as in other dtypes: the scale is not
            # the cause.
            self._scaler.raise_error_at_min_scale = False
        self._first = self.state()

    @property
    def can_fall(self) -> bool:
        """True if a lower loss scale may remove the overflow of a gradient."""
        return self._falls and self._scaler.cur_scale > self._scaler.min_scale

    @property
    def _falls(self) -> bool:
        return self._scaler is not None and bool(self._scaler.dynamic)

    def state(self) -> dict[str, float]:
        """State for `restore`; empty if the model is not float16."""
        if self._scaler is None:
            return {}
        return {field: getattr(self._scaler, field) for field in FIELDS if hasattr(self._scaler, field)}

    def begin_anew(self) -> None:
        """Reset the loss scale to its initial state."""
        self.restore(self._first)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of a dynamic loss scale. A fixed scale keeps the configured value."""
        if self._falls:
            for field, value in state.items():
                setattr(self._scaler, field, value)
