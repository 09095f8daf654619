"""See `standin`."""

from standin import stand_in

__version__ = "0.4.7"
__getattr__ = stand_in(__name__)
