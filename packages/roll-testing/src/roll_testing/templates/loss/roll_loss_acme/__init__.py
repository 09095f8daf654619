"""The policy loss acme of ROLL."""
