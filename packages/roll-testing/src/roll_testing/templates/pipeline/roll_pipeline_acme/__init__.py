"""The pipeline acme of ROLL."""
