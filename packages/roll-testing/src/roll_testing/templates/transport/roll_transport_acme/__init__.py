"""The weight transport acme of ROLL."""
