"""The plugin host: discovery (`loader`), lookup by name (`registry`), import on use (`targets`), events."""
