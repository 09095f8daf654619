"""Conformance kit for infer strategies."""
