"""The tracker acme of ROLL."""
