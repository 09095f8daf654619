"""Built-in rewards: a user's Python function, and a model."""
