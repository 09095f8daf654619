"""Parts that ship with roll-core, provided through the same hooks as those of plugins."""
