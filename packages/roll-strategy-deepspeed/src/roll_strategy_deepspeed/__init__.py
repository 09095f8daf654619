"""ROLL's train strategies on DeepSpeed."""
