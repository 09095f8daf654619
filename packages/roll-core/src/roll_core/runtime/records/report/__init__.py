"""`report.html`: a whole run on one page that needs no network, whatever state the run is in.

    run.json  metrics.jsonl  samples.jsonl  config.yaml  log.txt  checkpoints/  ─►  page  ─►  template  ─►  report.html

Every file may be missing, cut off or full of nonsense: the page shows what there is and says what there is not.
"""

from roll_core.runtime.records.report.page import write_report

__all__ = ["write_report"]
