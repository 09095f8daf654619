"""ROLL: reinforcement-learning post-training for large language models, as a small core and plugins."""

__version__ = "0.1.0"
