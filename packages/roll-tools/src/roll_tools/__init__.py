"""Commands that read runs and play environments, and the report of a run."""
