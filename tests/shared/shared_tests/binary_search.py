"""Oracle of the environment `guess_number`."""

from __future__ import annotations


class BinarySearch:
    """Oracle: guesses the middle of the numbers that are left."""

    def __init__(self, *, low: int = 1, high: int = 100) -> None:
        self.low, self.high, self.guess = low, high, 0

    def reply(self, message: str) -> str:
        """The guess after a message of the environment."""
        if message == "higher":
            self.low = self.guess + 1
        elif message == "lower":
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)
