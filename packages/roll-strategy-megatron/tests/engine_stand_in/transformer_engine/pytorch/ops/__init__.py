"""Names in annotations of megatron-core."""


class Sequential:
    pass


class FusibleOperation:
    pass
