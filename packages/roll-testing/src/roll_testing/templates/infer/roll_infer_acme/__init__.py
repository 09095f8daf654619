"""The inference engine acme of ROLL."""
