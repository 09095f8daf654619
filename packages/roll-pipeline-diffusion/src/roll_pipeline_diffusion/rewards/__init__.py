"""Rewards of images and videos."""
