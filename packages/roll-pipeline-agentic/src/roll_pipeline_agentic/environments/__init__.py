"""Environments whose episodes depend only on the seed and the replies. Each has an oracle that solves it."""
