"""Megatron-Core as a train strategy of ROLL."""
