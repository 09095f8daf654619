"""An environment of verifiers 0.2 as a user writes it."""

from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ("elm", "oak", "fir")


def says(completion: Any, answer: str) -> float:
    return float(answer in completion[-1].content)


async def short(completion: Any) -> float:
    return 1.0 / (1 + len(completion[-1].content))


def spelled(completion: Any, answer: str) -> bool:
    return any("-".join(answer) in str(each.content) for each in completion if each.role == "tool")


def broken(completion: Any) -> float:
    raise ValueError("no such level")


def empty(completion: Any) -> float:
    """Forgot its return."""


def best(completions: Any) -> list[float]:
    return [1.0 for _ in completions]


def spell(word: str) -> str:
    """Spells a word.

    Args:
        word: The word.
    """
    return "-".join(word)


class Conversation(vf.MultiTurnEnv):
    """Asks again until the word is said."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content="Once more.")]

    @vf.stop
    async def is_said(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["answer"] in state["trajectory"][-1]["completion"][-1].content


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        raise vf.InfraError("no machine")


def load_environment(kind: str = "single", reward: str = "", **options: Any) -> vf.Environment:
    rows = [{"question": f"Say {each}.", "answer": each} for each in WORDS]
    held_out = Dataset.from_list([{"question": "Say yew.", "answer": "yew"}])
    rubric = vf.Rubric(funcs=[says, short], weights=[2.0, 0.25])
    rubric.add_metric(spelled)
    if reward:
        rubric.add_reward_func({"broken": broken, "empty": empty, "best": best}[reward])
    given: dict[str, Any] = {"dataset": Dataset.from_list(rows), "eval_dataset": held_out, "rubric": rubric, **options}
    match kind:
        case "turns":
            return Conversation(max_turns=2, **given)
        case "tools":
            return vf.ToolEnv(tools=[spell], max_turns=3, **given)
        case "broken":
            return Broken(**given)
        case "group":
            return vf.EnvGroup([vf.SingleTurnEnv(**given), Conversation(max_turns=2, **given)])
    return vf.SingleTurnEnv(**given)
