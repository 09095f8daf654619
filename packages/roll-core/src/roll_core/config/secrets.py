"""Which values a message must not show."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(api_?key|access_?key(_id)?|secret|password|passwd|credentials?|private_?key|(^|_)token)$", re.I)


def is_secret(key: str) -> bool:
    """Whether a key or environment variable of this name holds a secret: `wandb_api_key`, `HF_TOKEN`."""
    return _SECRET.search(key) is not None
