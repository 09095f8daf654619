"""The same class under TRL's GRPOTrainer and under `tools`: same prompts, tool calls and rewards.

`./run test-engines trl`. The trainer, its chat template, its parser, its tool loop and its rewards are TRL's; only the
replies are given.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_environments import Counter, Silent, call, play

from roll_core.spec.environment import Reply
from roll_environments.python_tools import PythonTools

pytestmark = [
    pytest.mark.engine("trl"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL uses names that transformers deprecated
]

END = "<|im_end|>"


class Level:
    """Like TRL's first example of an environment: `reset` returns nothing, and a reward function reads the object."""

    def __init__(self) -> None:
        self.level = 0

    def reset(self, **row: Any) -> None:
        self.level = 0

    def raise_by(self, steps: int, reason: str = "none") -> str:
        """
        Raise the level.

        Args:
            steps: Number of steps.
            reason: Why it is raised.

        Returns:
            The new level.
        """
        self.level += steps
        return f"level {self.level}"

    @property
    def height(self) -> int:
        raise AssertionError("properties are no tools")


def height(completions: Any, environments: Any, **columns: Any) -> list[float | None]:
    return [each.level / 10 if each.level else None for each in environments]


def length(completions: Any, **columns: Any) -> list[float]:
    return [0.25 * len(each) for each in completions]


def nearness(prompts: Any, completions: Any, environments: Any, goal: Any, **columns: Any) -> list[float]:
    """Reads the arguments of a call, the object and a column."""
    numbers = [each[0]["tool_calls"][0]["function"]["arguments"]["number"] for each in completions]
    counts = [each.count for each in environments]
    return [number + count / of for number, count, of in zip(numbers, counts, goal, strict=True)]


class Judged(Counter):
    """Its reward is a coroutine function, as for a judge."""

    async def get_reward(self) -> float:  # type: ignore[override]
        return self.count / 8


class ServerSession:
    """Stands for the SDK that TRL's `OpenReward` environments call."""

    def __enter__(self) -> ServerSession:
        self.total = 0
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def get_prompt(self) -> list[Any]:
        return [{"type": "text", "text": " Reach 5."}]

    def call_tool(self, name: str, given: dict[str, Any]) -> Any:
        self.total += given["amount"]
        blocks = [{"type": "text", "text": f"total {self.total}"}]
        done = self.total == 5
        return SimpleNamespace(blocks=blocks, reward=float(done), metadata={}, finished=done)


def open_reward() -> Any:
    """TRL's own environment class, made as its `OpenRewardSpec` makes it."""
    from trl.experimental.openreward.environment import _RolloutEnvironment

    parameters = {"amount": {"type": "integer", "description": "What is added."}}
    schema = {"type": "object", "properties": parameters, "required": ["amount"]}
    tool = {"name": "grow", "description": "Adds an amount.", "input_schema": schema}
    server = SimpleNamespace(session=lambda **given: ServerSession())
    return _RolloutEnvironment(base_url="http://localhost", _client=server, _env=server, _tool_specs=[tool])


def last_reward(environments: Any, **columns: Any) -> list[float | None]:
    return [each.reward for each in environments]


def written(reply: str | Reply) -> str:
    """A reply as Qwen 3 writes it."""
    if isinstance(reply, str):
        return reply
    functions = [each["function"] for each in reply.tool_calls]
    calls = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions]
    return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in calls)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte tokenizer with the chat template of Qwen 3, in TRL's copy."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", END, "<|endoftext|>"])
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token="<|endoftext|>")
    found.chat_template = qwen3_chat_template
    return found


def under_trl(
    monkeypatch: pytest.MonkeyPatch, folder: Any, tokenizer: Any, factory: Any, rewards: Any, row: Any, replies: Any
) -> tuple[list[str], list[Any], dict[str, float]]:
    """The prompts of one training step, the conversation, and the rewards by function."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    prompts: list[str] = []
    scored: list[tuple[Any, Any]] = []

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **options: Any) -> Any:
            prompts.append(tokenizer.decode(prompt_ids[0]))
            text = written(replies[len(prompts) - 1]) + END
            return [tokenizer(text)["input_ids"] for _ in prompt_ids], None

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            found = super()._calculate_rewards(inputs, prompts, completions, ids)
            scored.append((completions[0], dict(zip(self.reward_func_names, found[0].tolist(), strict=True))))
            return found

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape = Qwen3Config(vocab_size=len(tokenizer), head_dim=8, num_key_value_heads=1, **sizes)
    options = GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4000,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = Scripted(
        model=Qwen3ForCausalLM(shape),
        reward_funcs=list(rewards),
        args=options,
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
        environment_factory=factory,
    )
    trainer.train()
    ((conversation, found),) = scored
    return prompts, conversation, found


def plain(messages: Any) -> list[dict[str, Any]]:
    """Messages without the ids of calls, which Qwen's format has not."""
    kept = []
    for each in messages:
        message = {"role": each["role"], "content": each.get("content") or ""}
        if each.get("tool_calls"):
            message["tool_calls"] = [item["function"] for item in each["tool_calls"]]
        kept.append(message)
    return kept


@pytest.mark.parametrize(
    ("factory", "rewards", "row", "replies"),
    [
        (Counter, [], {"goal": 5}, [call("add", number=2), call("undo"), call("add", number=5), "Done."]),
        (Counter, [length], {"goal": 5}, [call("add", number=2), "Done."]),
        (Silent, [nearness], {"goal": 8}, [call("add", number=4), "Done."]),
        (Judged, [length], {"goal": 5}, [call("add", number=6), "Done."]),
        (Level, [height, length], {}, [call("raise_by", steps=3), call("raise_by", steps=1, reason="more"), "Done."]),
        (Level, [height, length], {}, ["Nothing."]),
        (open_reward, [last_reward], {}, [call("grow", amount=2), call("grow", amount=3), "Done."]),
        (open_reward, [last_reward], {}, [call("grow", amount=2), "Done."]),
    ],
)
def test_a_class_has_the_prompts_calls_and_rewards_of_trl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, tokenizer: Any, factory: Any, rewards: Any, row: Any, replies: Any
) -> None:
    row = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}], **row}
    prompts, conversation, theirs = under_trl(monkeypatch, tmp_path, tokenizer, factory, rewards, row, replies)
    environment = PythonTools(
        target=f"test_tools_against_trl:{factory.__name__}",
        rewards=[f"test_tools_against_trl:{each.__name__}" for each in rewards],
    )
    opening, _, score = play(environment, replies, task=row)
    shown = tokenizer.apply_chat_template(
        list(opening.messages), tools=list(opening.tools), tokenize=False, add_generation_prompt=True
    )
    assert shown == prompts[0]
    assert len(prompts) == len(replies)
    assert plain(environment.messages[environment.num_prompt :]) == plain(conversation)
    assert score is not None
    assert dict(score.detail) == pytest.approx({name: value for name, value in theirs.items() if value == value})
