"""Advantages, losses, KL estimators, normalisation, aggregation: pure functions on tensors."""
