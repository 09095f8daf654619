"""The parts that come with the core, provided through the same hooks as anyone else's."""
