"""The conformance kit for infer strategies."""
