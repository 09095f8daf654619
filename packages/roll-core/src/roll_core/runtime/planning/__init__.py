"""Prediction of a run's memory: placement of workers, and the memory of each role in each phase.

`roll-core plan` uses it before a run, and a run for its record. Nothing here imports torch or Ray.
"""
