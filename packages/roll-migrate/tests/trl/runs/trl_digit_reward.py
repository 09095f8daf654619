"""A reward with TRL's signature."""


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) / 4 for text in completions]
