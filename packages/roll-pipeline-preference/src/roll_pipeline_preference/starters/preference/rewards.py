"""The score of validation responses. Replace the body by your own."""


def score(prompt: str, response: str, ground_truth: str) -> float:
    """Score of one response: 1 for the digits in order, else 0.

    Arguments are the prompt, the response without special tokens, and the columns of the row that you name.
    """
    return float(response == ground_truth)
