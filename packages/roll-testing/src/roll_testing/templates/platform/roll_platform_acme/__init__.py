"""The platform acme of ROLL."""
