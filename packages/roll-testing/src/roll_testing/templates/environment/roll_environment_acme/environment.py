"""Environment `acme`: guess a number between 0 and `largest`."""

import random
import re

from roll_core.spec.environment import Environment, Opening, Reply, Task, Turn


class AcmeEnvironment(Environment):
    """A right guess has reward 1, and 0.1 less for each guess before. All methods are coroutines that never block."""

    def __init__(self, *, largest: int = 31, max_guesses: int = 6) -> None:
        self.largest, self.max_guesses = largest, max_guesses

    async def reset(self, task: Task, seed: int) -> Opening:
        """Choose the number. The seed alone decides it, because a resumed run repeats episodes."""
        self.number, self.num_guesses = random.Random(seed).randint(0, self.largest), 0
        text = f"Guess my number between 0 and {self.largest}. Reply with one number."
        return Opening(messages=[{"role": "user", "content": text}])

    async def step(self, reply: Reply) -> Turn:
        """Compare the first number of the reply. Any text is a valid reply."""
        self.num_guesses += 1
        match = re.search(r"\d{1,9}", reply.text)
        guess = int(match[0]) if match else -1
        if guess == self.number:
            return Turn(reward=1.0 - 0.1 * (self.num_guesses - 1), done=True)
        text = "Reply with a number." if guess < 0 else f"My number is {'higher' if guess < self.number else 'lower'}."
        return Turn(
            messages=[{"role": "user", "content": text}],
            reward=0.0,
            truncated=self.num_guesses >= self.max_guesses,
            metrics={"valid": float(guess >= 0)},
        )
