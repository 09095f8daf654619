"""Tracker `acme`: one row per metric in a SQLite database that other programs can query during the run."""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_core.spec.pipeline import Tracker
from roll_tracker_acme.config import AcmeTrackerConfig

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (run TEXT, step INTEGER, name TEXT, value REAL);
CREATE TABLE IF NOT EXISTS configs (run TEXT, config TEXT);
"""


class AcmeTracker(Tracker):
    """Options are received as written in the config; the schema adds defaults."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Open the database. A resumed run opens it again."""
        self.run_name = run_name
        self.database = sqlite3.connect(run_dir / AcmeTrackerConfig.model_validate(dict(options)).file)
        self.database.executescript(TABLES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Insert the metrics of a step. SQLite stores NaN as NULL."""
        rows = [(self.run_name, step, name, value) for name, value in metrics.items()]
        with self.database:
            self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Insert the config as JSON."""
        with self.database:
            self.database.execute("INSERT INTO configs VALUES (?, ?)", (self.run_name, json.dumps(dict(config))))

    def close(self) -> None:
        """Close the database."""
        self.database.close()
