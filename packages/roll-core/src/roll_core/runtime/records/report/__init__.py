"""`report.html`: a self-contained page about a run in any state; it needs no network.

    run.json  metrics.jsonl  samples.jsonl  images.jsonl
    config.yaml  log.txt  checkpoints/  ─►  page  ─►  template  ─►  report.html

Every file may be missing, truncated or corrupted: the page shows what can be read and notes what is missing.
"""

from roll_core.runtime.records.report.comparison import write_comparison
from roll_core.runtime.records.report.page import write_report

__all__ = ["write_comparison", "write_report"]
