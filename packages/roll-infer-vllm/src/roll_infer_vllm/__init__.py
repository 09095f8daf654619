"""ROLL's infer strategy on vLLM."""
