"""The factor on the loss in float16, which DeepSpeed's optimizers search for while they train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a search remembers; a fixed factor only has the first."""


class LossScale:
    """Of one engine, at stages 1 to 3; 1 where the model is not float16."""

    def __init__(self, engine: Any) -> None:
        scaler: Any = engine.optimizer.loss_scaler if engine.fp16_enabled() else None
        self._scaler = scaler
        if self._falls:
            # At its lowest it is not the scale that spoils the gradient: the step is skipped as in any other dtype.
            self._scaler.raise_error_at_min_scale = False
        self._first = self.state()

    @property
    def can_fall(self) -> bool:
        """Whether a gradient that is not finite may become so with a lower factor."""
        return self._falls and self._scaler.cur_scale > self._scaler.min_scale

    @property
    def _falls(self) -> bool:
        return self._scaler is not None and bool(self._scaler.dynamic)

    def state(self) -> dict[str, float]:
        """What `restore` takes."""
        if self._scaler is None:
            return {}
        return {field: getattr(self._scaler, field) for field in FIELDS if hasattr(self._scaler, field)}

    def begin_anew(self) -> None:
        """Where the config begins."""
        self.restore(self._first)

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with the search where it was; a factor that is fixed stays what the config says."""
        if self._falls:
            for field, value in state.items():
                setattr(self._scaler, field, value)
