"""The vision example's reward: 1 for the digit of the picture, 0 for anything else."""


def names_digit(prompt: str, response: str, digit: int, **row: object) -> float:
    """Compare the answer's text with the row's `digit`."""
    return 1.0 if response.strip() == str(digit) else 0.0
