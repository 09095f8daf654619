"""Trackers for ROLL: wandb, mlflow, trackio and CSV."""
