"""`python -m roll_core` is `roll-core`, with the working directory on the path."""

import sys

from roll_core.cli.main import main

sys.exit(main())
