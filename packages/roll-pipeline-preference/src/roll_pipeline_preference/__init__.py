"""Pipelines for preference training and reward models."""
