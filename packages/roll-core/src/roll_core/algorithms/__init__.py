"""Advantages, losses, KL estimators, normalisation and aggregation as pure functions on tensors."""
