"""The train strategy acme of ROLL."""
