"""The agent acme of ROLL."""
