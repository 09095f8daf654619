"""roll-modeling's own use of its build hook, which is not installed yet when roll-modeling is built."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from roll_modeling.extension_wheel import ExtensionHook

__all__ = ["ExtensionHook"]
