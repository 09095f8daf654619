"""Registers the tracker `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrackerProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    """Tracker `acme`."""
    yield TrackerProvider(
        name="acme",
        target="roll_tracker_acme.tracker:AcmeTracker",
        config="roll_tracker_acme.config:AcmeTrackerConfig",
        summary="A SQLite table of metrics",
    )
