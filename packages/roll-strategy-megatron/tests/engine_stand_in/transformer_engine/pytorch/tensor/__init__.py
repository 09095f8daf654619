"""No tensor is one of these."""


class QuantizedTensor:
    pass
