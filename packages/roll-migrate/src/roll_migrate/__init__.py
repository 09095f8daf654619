"""Converts other frameworks' configs to roll-core's, and reports the outcome for each key with the reason."""
