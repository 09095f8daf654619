"""Which values are nobody's business."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(r"(api_?key|access_?key(_id)?|secret|password|passwd|credentials?|private_?key|(^|_)token)$", re.I)


def is_secret(key: str) -> bool:
    """Whether a key or environment variable of this name holds a secret: `wandb_api_key`, `HF_TOKEN`."""
    return _SECRET.search(key) is not None


def redact(value: Any) -> Any:
    """A copy of plain values with every secret hidden, for records and trackers."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if is_secret(str(key)) and each not in (None, "") else redact(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(each) for each in value]
    return value
