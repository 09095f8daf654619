"""roll-core's own use of its build hook, which is not installed yet when roll-core is built."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from roll_core.native.extension_wheel import ExtensionHook

__all__ = ["ExtensionHook"]
