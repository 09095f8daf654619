"""Train strategies on torch's FSDP2."""
