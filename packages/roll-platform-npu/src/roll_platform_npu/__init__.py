"""ROLL's platform for Ascend NPUs."""
