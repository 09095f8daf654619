"""Discovery of plugins and the registry of what they offer."""
