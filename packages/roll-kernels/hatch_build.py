"""roll-kernels' use of its own build hook, which is not installed yet when roll-kernels is built."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from roll_kernels.extension_wheel import ExtensionHook

__all__ = ["ExtensionHook"]
