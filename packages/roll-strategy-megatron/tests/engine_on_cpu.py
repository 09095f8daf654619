"""From the import of this module on Transformer Engine can be imported: what stands for it, in `engine_stand_in`. For
ranks alone: of a test's own process others inherit the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "engine_stand_in"))
