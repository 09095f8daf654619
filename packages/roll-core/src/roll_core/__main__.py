"""`python -m roll_core` is `roll-core`, with the working directory on the path."""

from roll_core.cli.main import command_line

command_line()
