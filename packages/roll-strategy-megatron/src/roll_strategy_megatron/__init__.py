"""ROLL's train strategies on Megatron-Core."""
