"""Built-in rewards: rule-based mathematics, and a user's Python function."""
