"""Names that megatron-core derives from."""


class DelayedScaling:
    """Nothing here computes in fp8."""
