"""The quick start's reward: 1 for the digits in order, 0 for anything else; the same in two components."""


def sorted_digits(prompt: str, response: str, ground_truth: str, **row: object) -> float:
    """Compare the answer's text with the row's `ground_truth`."""
    return 1.0 if response.strip() == ground_truth else 0.0


def sorted_in_parts(prompt: str, response: str, ground_truth: str, **row: object) -> dict[str, float]:
    """The reward with two components, as `gdpo` needs them: digits in order, and the digits of the prompt."""
    digits = response.strip()
    in_order, same_digits = digits == "".join(sorted(digits)), sorted(digits) == list(ground_truth)
    return {
        "value": float(in_order and same_digits),
        "in_order": float(in_order),
        "same_digits": float(same_digits),
    }
