"""The reward of this run. Replace the body by your own."""


def score(prompt: str, response: str, ground_truth: str) -> float:
    """Reward of one response: the share of positions with the right digit, less for a wrong length.

    Arguments are the prompt, the response without special tokens, and the columns of the row that you name. Return a
    number, or {"value": number, "NAME": number or text} with details for the report. An exception is a failed reward,
    never 0.
    """
    right = sum(digit == expected for digit, expected in zip(response, ground_truth, strict=False))
    return right / max(len(response), len(ground_truth))
