"""The advantage estimator acme of ROLL."""
