"""See `standin`."""

from standin import stand_in

__version__ = "0.28.0"
__getattr__ = stand_in(__name__)
