"""Infer strategy on vLLM, for ROLL."""
