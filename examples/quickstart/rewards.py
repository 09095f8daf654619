"""The quick start's reward: 1 for the digits in order, 0 for anything else."""


def sorted_digits(prompt: str, response: str, ground_truth: str, **row: object) -> float:
    """Compare the answer's text with the row's `ground_truth`."""
    return 1.0 if response.strip() == ground_truth else 0.0
