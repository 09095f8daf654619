"""Infer strategy on SGLang, for ROLL."""
