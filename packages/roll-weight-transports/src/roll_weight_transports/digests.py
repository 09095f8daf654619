"""Choice of how this process computes digests: during the copy with roll-kernels, otherwise in a separate pass."""

from __future__ import annotations

import logging
from functools import lru_cache

from roll_core.errors import ExtensionError
from roll_core.spec.weights import set_leaf_function

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def use_compiled_digests() -> bool:
    """Compute digests with the kernel of roll-kernels, compiling it if necessary; False if it is unavailable."""
    try:
        from roll_kernels.digests import compiled_leaves_of, library

        library()
    except (ModuleNotFoundError, ExtensionError) as error:
        log.info("digests are computed in a separate, slower pass, because the kernel is unavailable: %s", error)
        return False
    set_leaf_function(compiled_leaves_of)
    return True
