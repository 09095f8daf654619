"""Stand-in for the state of fp8, which is disabled."""

import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


@contextlib.contextmanager
def fp8_autocast(enabled=True, **options):
    assert not enabled
    yield


fp8_model_init = None
"""For fp8."""
