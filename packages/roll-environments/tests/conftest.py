"""The tests' helpers can be imported by their names, as files of a user."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
