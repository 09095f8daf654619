"""The executor acme of ROLL."""
