"""Strategies that are wrong on purpose, one mistake each, and the right one that they are made from."""
