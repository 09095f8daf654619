"""Workers: one rank of a role each, around the strategy or reward that a plugin provides."""
