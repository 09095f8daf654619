"""The environment acme of ROLL."""
