"""guess_number played by a script that knows only the client of OpenAI: the agent of agent_openai.yaml."""

import random
import re
from functools import cache

from openai import AsyncOpenAI


@cache
def client(base_url: str) -> AsyncOpenAI:
    """One client with its connections for all rollouts."""
    return AsyncOpenAI(base_url=base_url, api_key="of each rollout")


async def play(task, session, low: int = 1, high: int = 8, guesses: int = 4):
    """Play one game, and return its reward."""
    policy = client(session.base_url).with_options(api_key=session.api_key)
    number = random.Random(session.seed).randint(low, high)
    messages = [{"role": "user", "content": f"Guess a number from {low} to {high}."}]
    for _ in range(guesses):
        completion = await policy.chat.completions.create(model=session.model, messages=messages)
        reply = completion.choices[0].message.content
        found = re.findall(r"-?[0-9]{1,9}", reply)
        if found and int(found[-1]) == number:
            return 1.0
        answer = "Reply with a number." if not found else "higher" if int(found[-1]) < number else "lower"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return 0.0
