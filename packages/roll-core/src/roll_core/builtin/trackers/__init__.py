"""Trackers that come with the core."""
