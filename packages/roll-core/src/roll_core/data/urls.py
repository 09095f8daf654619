"""Images and videos at URLs: fetched once, within a time and a size, to a cache that later runs read.

    ~/.cache/roll/urls/<BLAKE2 of the URL>

A run that resumes reads the same bytes, even if the server has other ones by then. What cannot be decoded is removed: a
server may reply with a page that reports an error.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from roll_core.errors import DataError
from roll_core.http_requests import open_within
from roll_core.types import media_digest

SCHEMES = ("http", "https")
TIMEOUT_S = 60.0
"""Time in which a file must have arrived."""
MAX_BYTES = 256 << 20
"""Larger files are refused."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


def fetched(url: str) -> Path:
    """The file in the cache with what `url` has, which is fetched first unless it is there.

    Raises `DataError` for other schemes than `SCHEMES`, an answer other than 200, and a file that is too slow or large.
    """
    path = _cached(url)
    if not path.exists():
        data = _fetch(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        working = path.with_suffix(f".{os.getpid()}")
        working.write_bytes(data)
        os.replace(working, path)
    return path


def forget(url: str) -> None:
    """Remove the file of `url` from the cache, if it has one."""
    _cached(url).unlink(missing_ok=True)


def _cached(url: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "roll", "urls", media_digest(url.encode()))


def _fetch(url: str) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        if urlsplit(url).scheme.lower() not in SCHEMES:
            raise DataError(f"{url:.200} is no URL of {' or '.join(SCHEMES)}")
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "roll-core"})
            with open_within(request, TIMEOUT_S) as reply:
                data = reply.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            target = error.headers.get("Location")
            if error.code not in _REDIRECTS or not target:
                raise DataError(f"{url:.200} cannot be fetched: HTTP status {error.code}") from error
            url = urljoin(url, target)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a URL without a host
            reason = getattr(error, "reason", None) or error
            raise DataError(f"{url:.200} cannot be fetched: {reason}") from error
        else:
            if len(data) > MAX_BYTES:
                raise DataError(f"{url:.200} has more than {MAX_BYTES >> 20} MiB")
            if reply.length:  # `read` of a number of bytes does not report it
                raise DataError(f"{url:.200} ended {reply.length} bytes early")
            return data
    raise DataError(f"{url:.200}: more than {MAX_REDIRECTS} redirects")
