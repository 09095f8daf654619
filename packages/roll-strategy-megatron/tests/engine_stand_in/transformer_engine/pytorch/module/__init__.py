"""Stand-ins for the layers of Transformer Engine."""
