"""Environments for the pipeline `agentic`, and adapters for environments of other packages."""
