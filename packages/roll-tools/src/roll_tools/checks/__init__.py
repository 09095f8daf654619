"""Checks that `roll-core doctor` runs on every machine."""
