"""The conformance tests of trackers."""

import contextlib
import itertools
import sqlite3

from roll_testing import TrackerConformance


class TestAcmeTracker(TrackerConformance):
    """`acme` in its own file of the run directory."""

    name = "acme"

    def read(self, run_dir):
        """The recorded steps with their metrics."""
        with contextlib.closing(sqlite3.connect(run_dir / "acme.sqlite")) as database:
            rows = database.execute("SELECT step, name, value FROM metrics ORDER BY rowid").fetchall()
        return [
            (step, {name: value for _, name, value in group})
            for step, group in itertools.groupby(rows, key=lambda row: row[0])
        ]
