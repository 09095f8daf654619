"""A third party's plugin."""
