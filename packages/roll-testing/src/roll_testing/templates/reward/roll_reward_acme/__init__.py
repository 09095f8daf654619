"""The reward acme of ROLL."""
