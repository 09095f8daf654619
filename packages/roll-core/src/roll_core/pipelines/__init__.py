"""The pipelines that come with the core."""
