"""Conformance kit for recording endpoints, which agents call and which record tokens.

    class TestMine(RecordingConformance):
        @asynccontextmanager
        async def rollout(self, context, encoder, *, calls, tokens):
            ...
            yield Rollout under test, with base_url, api_key and `await finish()`

Each test sends requests over HTTP to an endpoint whose policy replies by script.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import urlsplit

import numpy as np
import pytest
from typing_extensions import override

from roll_core.data.rollouts import rows, tokens_of
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.rollout import RolloutContext
from roll_core.types import Completion, CompletionOutput, Media, SamplingParams
from roll_pipeline_agentic.chat_encoder import ChatEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from roll_core.spec.environment import Message
    from roll_core.types import Group, Rollout, TokenIds

TEXTS = ["the number is higher", "the number is lower", "the answer to the question"] * 4
TIMEOUT_S = 20.0


class RecordedRollout(Protocol):
    """A rollout of the endpoint under test."""

    base_url: str
    api_key: str

    async def finish(self) -> tuple[Rollout, str]:
        """End the rollout. Returns its turns, and why it cannot be trained on (empty if it can)."""


@dataclass
class Sampled:
    """A call of the policy."""

    prompt_ids: TokenIds
    n: int
    outputs: tuple[CompletionOutput, ...]
    media: tuple[Media, ...] = ()


class ScriptedPolicy(RolloutContext):
    """Replies with one text after the other, one token per character, as no tokenizer would encode it."""

    def __init__(self, tokenizer: Any, replies: Sequence[str] = ()) -> None:
        self.tokenizer, self.replies = tokenizer, list(replies)
        self.n, self.params = 1, SamplingParams(max_new_tokens=64)
        self.calls: list[Sampled] = []
        self.open = asyncio.Event()
        self.open.set()
        self.arrived = asyncio.Event()
        self.num_reported = 0
        """Tokens of a reply that a stream gets before `open` is set."""

    @override
    async def generate(
        self,
        prompt_ids: TokenIds,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
        media: tuple[Media, ...] = (),
        key: str = "",
        on_progress: Callable[[Sequence[CompletionOutput | None]], None] | None = None,
    ) -> Completion:
        self.arrived.set()
        if on_progress is None or not self.num_reported:
            await self.open.wait()
        outputs = tuple(self._output(self.replies.pop(0) if self.replies else "number", at) for at in range(n))
        self.calls.append(Sampled(prompt_ids, n, outputs, media))
        if on_progress is not None:
            for number in range(1, max(len(each.token_ids) for each in outputs)):
                if number > self.num_reported:
                    await self.open.wait()
                on_progress([_first(output, number) for output in outputs])
                await asyncio.sleep(0)
        return Completion(id=key, outputs=outputs)

    def _output(self, text: str, at: int) -> CompletionOutput:
        ids = [self.tokenizer(each, add_special_tokens=False)["input_ids"][-1] for each in text]
        ids += [self.tokenizer.eos_token_id] if text else []
        return CompletionOutput(
            token_ids=np.array(ids, dtype=np.int64),
            logprobs=(-np.arange(1, len(ids) + 1) / 8 - at - len(self.calls)).astype(np.float32),
            versions=np.full(len(ids), 3, dtype=np.int32),
            finish_reason="stop" if text else "abort",
        )

    @override
    async def score(self, group: Group) -> Group:
        return group


def _first(output: CompletionOutput, number: int) -> CompletionOutput:
    """The first tokens of an output that is not complete."""
    return CompletionOutput(
        token_ids=output.token_ids[:number],
        logprobs=output.logprobs[:number],
        versions=output.versions[:number],
        finish_reason="abort",
    )


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


class RecordingConformance:
    """Tests that every recording endpoint must pass."""

    first_bytes_s: ClassVar[float] = TIMEOUT_S
    """Seconds until the first tokens of a stream arrive."""

    def rollout(
        self, context: RolloutContext, encoder: ChatEncoder, *, calls: int, tokens: int
    ) -> AbstractAsyncContextManager[RecordedRollout]:
        """A new rollout of at most `calls` calls and conversations of at most `tokens` tokens."""
        raise NotImplementedError

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_a_prompt_begins_with_the_recorded_tokens(self) -> None:
        """The second prompt is the first one, its sampled tokens, and the new message. Nothing is encoded again."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            await self._converse(recorded, ["the question", "higher", "lower"])
            return await self._finished(recorded)

        policy, _ = self._run(play)
        for before, after in zip(policy.calls, policy.calls[1:], strict=False):
            known = np.concatenate([before.prompt_ids, before.outputs[0].token_ids])
            assert after.prompt_ids[: len(known)].tolist() == known.tolist(), "sampled tokens were encoded again"

    def test_every_turn_is_recorded(self) -> None:
        """The rollout has what the engine sampled: ids, logprobs and versions of each call, in order."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            await self._converse(recorded, ["the question", "higher", "lower"])
            return await self._finished(recorded)

        policy, rollout = self._run(play)
        assert len(rollout.turns) == len(policy.calls), "a turn is missing"
        for turn, call in zip(rollout.turns, policy.calls, strict=True):
            assert turn.sampled_ids.tolist() == call.outputs[0].token_ids.tolist()
        for index, call in enumerate(policy.calls):
            whole = [*call.prompt_ids.tolist(), *call.outputs[0].token_ids.tolist()]
            assert tokens_of(rollout, index).tolist() == whole, "a turn has another prompt than the engine"

    def test_logprobs_are_those_of_the_engine(self) -> None:
        """Logprobs and versions are as the engine reported them."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            await self._converse(recorded, ["the question", "higher"])
            return await self._finished(recorded)

        policy, rollout = self._run(play)
        for turn, call in zip(rollout.turns, policy.calls, strict=False):
            np.testing.assert_array_equal(turn.logprobs, call.outputs[0].logprobs)
            np.testing.assert_array_equal(turn.versions, call.outputs[0].versions)

    def test_turns_are_linked_by_their_tokens(self) -> None:
        """The parent of a turn is the longest earlier one with whose tokens its prompt begins."""
        policy, rollout = self._run(self._branch, ["number", "the lower", "the higher"])
        prompts = {tuple(call.outputs[0].token_ids.tolist()): call.prompt_ids.tolist() for call in policy.calls}
        known = [[*prompt, *sampled] for sampled, prompt in prompts.items()]
        for index, turn in enumerate(rollout.turns):
            prompt = prompts[tuple(turn.sampled_ids.tolist())]
            expected = max((each for each in known if prompt[: len(each)] == each), key=len, default=[])
            parent = [] if turn.parent is None else tokens_of(rollout, turn.parent).tolist()
            assert parent == expected, f"turn {index} continues {len(parent)} tokens, expected {len(expected)}"

    def test_a_branch_is_trained_once(self) -> None:
        """Two replies to one conversation: each sampled token is in the loss of one row."""
        policy, rollout = self._run(self._branch, ["number", "the lower", "the higher"])
        trained = Counter(text for row in rows(rollout) for text in self._trained_texts(row))
        sampled = Counter(tuple(call.outputs[0].token_ids.tolist()) for call in policy.calls)
        assert trained == sampled, "the rows do not train each sampled token once"

    def test_several_samples_of_a_request_are_siblings(self) -> None:
        """`n` samples have one prompt, and each is trained."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> tuple[Any, Rollout]:
            status, reply = await self._post(recorded, {"messages": [user("the question")], "n": 3})
            assert status == 200
            return [each["message"]["content"] for each in reply["choices"]], await self._finished(recorded)

        _, (contents, rollout) = self._run(play, ["the", "number", "higher"])
        assert contents == ["the", "number", "higher"]
        assert [turn.parent for turn in rollout.turns] == [None] * 3
        assert len({tuple(turn.context_ids.tolist()) for turn in rollout.turns}) == 1

    def test_a_stream_has_the_same_content(self) -> None:
        """The deltas of a stream join to the reply."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> tuple[str, Rollout]:
            status, text = await self._post(recorded, {"messages": [user("the question")], "stream": True})
            assert status == 200
            return text, await self._finished(recorded)

        _, (text, rollout) = self._run(play, ["the number is higher"])
        assert _streamed(text) == "the number is higher"
        assert len(rollout.turns) == 1

    def test_a_stream_shows_tokens_while_they_are_sampled(self) -> None:
        """The client has the first words before the policy samples the last ones."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> tuple[str, Rollout]:
            policy.open.clear()
            policy.num_reported = len("the number ")
            first, connection = await self._first_bytes(recorded, {"messages": [user("the question")], "stream": True})
            policy.open.set()
            with connection:
                await asyncio.to_thread(_read_all, connection)
            return first, await self._finished(recorded)

        _, (first, rollout) = self._run(play, ["the number is higher"])
        assert '"content": "t' in first.replace('"content":"', '"content": "')
        assert "higher" not in first
        assert len(rollout.turns) == 1

    def test_a_stream_that_broke_is_sent_whole_to_a_repeated_request(self) -> None:
        """A client disconnects in the middle of a stream and sends its request again: one turn, as an unbroken one."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> tuple[str, str, Rollout]:
            body = {"messages": [user("the question")], "stream": True}
            await self._break_stream(policy, recorded, body)
            _, text = await self._post(recorded, body, {"x-stainless-retry-count": "1"})
            _, unbroken = await self._post(recorded, body | {"messages": [user("the answer")]})
            return text, unbroken, await self._finished(recorded)

        policy, (text, unbroken, rollout) = self._run(play, ["the number is higher"] * 2)
        assert _streamed(text) == _streamed(unbroken)
        assert len(policy.calls) == len(rollout.turns) == 2

    def test_a_stream_that_broke_is_incomplete(self) -> None:
        """A client disconnects in the middle of a stream: it knows a part of a reply, which is no turn."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> str:
            await self._break_stream(policy, recorded, {"messages": [user("the question")], "stream": True})
            await self._post(recorded, {"messages": [user("the answer")]})
            return (await recorded.finish())[1]

        assert self._run(play, ["the number is higher", "lower"])[1], "the record counts as complete"

    def test_a_repeated_request_is_sampled_once(self) -> None:
        """A request that the client marks as repeated gets the recorded reply."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> tuple[Any, Rollout]:
            body = {"messages": [user("the question")]}
            first = await self._post(recorded, body)
            second = await self._post(recorded, body, {"x-stainless-retry-count": "1"})
            return (first, second), await self._finished(recorded)

        policy, ((first, second), rollout) = self._run(play)
        assert first[1]["choices"] == second[1]["choices"]
        assert len(policy.calls) == 1, "the policy was sampled twice for one request"
        assert len(rollout.turns) == 1

    def test_an_equal_request_is_sampled_again(self) -> None:
        """Without the mark of a repeated request, an equal one is a second sample."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            for _ in range(2):
                await self._post(recorded, {"messages": [user("the question")]})
            return await self._finished(recorded)

        policy, rollout = self._run(play, ["the", "number"])
        assert len(policy.calls) == 2
        assert len(rollout.turns) == 2

    def test_a_secret_ends_with_its_rollout(self) -> None:
        """Requests with another secret, or after the end of the rollout, are refused and not sampled."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> list[int]:
            body = {"messages": [user("the question")]}
            none, _ = await self._post(recorded, body, {"Authorization": "Bearer another"})
            valid, _ = await self._post(recorded, body)
            await recorded.finish()
            late, _ = await self._post(recorded, body)
            return [none, valid, late]

        policy, statuses = self._run(play)
        assert statuses == [401, 200, 401]
        assert len(policy.calls) == 1

    def test_rollouts_do_not_mix(self) -> None:
        """Two rollouts at the same time record their own calls."""

        async def main() -> list[list[str]]:
            found = []
            policies = [ScriptedPolicy(self._tokenizer(), [text]) for text in ("higher", "lower")]
            async with (
                self.rollout(policies[0], self._encoder(), calls=9, tokens=400) as one,
                self.rollout(policies[1], self._encoder(), calls=9, tokens=400) as other,
            ):
                for recorded in (other, one):
                    await self._converse(recorded, ["the question"])
                for recorded in (one, other):
                    rollout, _ = await recorded.finish()
                    found.append([self._tokenizer().decode(turn.sampled_ids[:-1]) for turn in rollout.turns])
            return found

        assert asyncio.run(asyncio.wait_for(main(), TIMEOUT_S)) == [["higher"], ["lower"]]

    def test_a_call_that_went_around_is_incomplete(self) -> None:
        """An assistant message that the endpoint did not generate excludes the rollout from training."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> str:
            history = await self._converse(recorded, ["the question"])
            foreign = {"role": "assistant", "content": "of another model"}
            await self._converse(recorded, ["lower"], [*history, user("higher"), foreign])
            return (await recorded.finish())[1]

        assert self._run(play)[1], "the record counts as complete"

    def test_a_response_without_tokens_is_incomplete(self) -> None:
        """An engine that returns no token ids excludes the rollout from training."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> str:
            await self._post(recorded, {"messages": [user("the question")]})
            return (await recorded.finish())[1]

        assert self._run(play, [""])[1], "the record counts as complete"

    def test_undelivered_reply_is_not_a_turn(self) -> None:
        """A client disconnects before the reply. The agent never saw it, so it is not trained on."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            policy.open.clear()
            await self._disconnect(recorded, {"messages": [user("the question")]}, policy.arrived)
            await asyncio.sleep(0.1)
            policy.open.set()
            await self._post(recorded, {"messages": [user("the answer")]})
            return await self._finished(recorded)

        policy, rollout = self._run(play, ["the", "number"])
        (turn,) = rollout.turns
        assert turn.context_ids.tolist() == policy.calls[-1].prompt_ids.tolist()

    def test_disconnected_client_gets_the_reply_on_retry(self) -> None:
        """A client disconnects before the reply and sends its request again: one turn."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
            body = {"messages": [user("the question")]}
            policy.open.clear()
            await self._disconnect(recorded, body, policy.arrived)
            await asyncio.sleep(0.1)
            policy.open.set()
            status, _ = await self._post(recorded, body, {"x-stainless-retry-count": "1"})
            assert status == 200
            return await self._finished(recorded)

        policy, rollout = self._run(play)
        assert len(policy.calls) == len(rollout.turns) == 1

    def test_limits_refuse_calls(self) -> None:
        """Calls and conversations beyond the limits get status 400, and are not sampled."""

        async def play(policy: ScriptedPolicy, recorded: RecordedRollout) -> list[int]:
            texts = ("the question " * 40, "the", "number", "higher")
            return [(await self._post(recorded, {"messages": [user(text)]}))[0] for text in texts]

        policy, statuses = self._run(play, calls=2, tokens=40)
        assert statuses == [400, 200, 200, 400]
        assert len(policy.calls) == 2

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _tokenizer(self) -> Any:
        return _tokenizer()

    def _encoder(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer(), DataArguments(template="plain"), where="the kit")

    def _run(self, play: Any, replies: Sequence[str] = (), *, calls: int = 9, tokens: int = 400) -> Any:
        """Run a test's coroutine with a policy and a rollout. Returns the policy and the coroutine's result."""

        async def main() -> tuple[ScriptedPolicy, Any]:
            policy = ScriptedPolicy(self._tokenizer(), replies)
            async with self.rollout(policy, self._encoder(), calls=calls, tokens=tokens) as recorded:
                return policy, await play(policy, recorded)

        return asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))

    async def _finished(self, recorded: RecordedRollout) -> Rollout:
        rollout, problem = await recorded.finish()
        assert not problem, problem
        return rollout

    async def _converse(
        self, recorded: RecordedRollout, texts: Sequence[str], history: Sequence[Message] = ()
    ) -> list[Message]:
        """Send messages, each after the reply to the one before. Returns the conversation."""
        messages = list(history)
        for text in texts:
            messages.append(user(text))
            status, reply = await self._post(recorded, {"messages": messages})
            assert status == 200, reply
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        return messages

    async def _post(
        self, recorded: RecordedRollout, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body of a request."""
        request = urllib.request.Request(
            f"{recorded.base_url}/chat/completions",
            data=json.dumps({"model": "policy", **body}).encode(),
            headers={"Authorization": f"Bearer {recorded.api_key}", "Content-Type": "application/json"}
            | (headers or {}),
        )

        def send() -> tuple[int, Any]:
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    text = response.read().decode()
                    return response.status, text if body.get("stream") else json.loads(text)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())

        return await asyncio.to_thread(send)

    async def _disconnect(self, recorded: RecordedRollout, body: dict[str, Any], arrived: asyncio.Event) -> None:
        """Send a request, and close the connection once the policy has it."""
        connection = await self._connected(recorded, body)
        await arrived.wait()
        connection.close()

    async def _first_bytes(self, recorded: RecordedRollout, body: dict[str, Any]) -> tuple[str, socket.socket]:
        """What arrives of a stream until its first content, and the open connection."""
        connection = await self._connected(recorded, body)
        connection.settimeout(self.first_bytes_s)
        text = ""
        try:
            while not any(f'"content":{blank}"{first}' in text for blank in ("", " ") for first in "tn"):
                part = await asyncio.to_thread(connection.recv, 1 << 16)
                assert part, f"the connection closed after {text!r}"
                text += part.decode()
        except BaseException:
            connection.close()
            raise
        return text, connection

    async def _break_stream(self, policy: ScriptedPolicy, recorded: RecordedRollout, body: dict[str, Any]) -> None:
        """Send a request, close the connection after its first content, and let the policy finish the reply."""
        policy.open.clear()
        policy.num_reported = len("the number ")
        try:
            _, connection = await self._first_bytes(recorded, body)
        except TimeoutError:
            pytest.skip("nothing arrives before the reply is complete, so that the middle of a stream cannot be met")
        connection.close()
        await asyncio.sleep(0.1)
        policy.open.set()

    async def _branch(self, policy: ScriptedPolicy, recorded: RecordedRollout) -> Rollout:
        """A conversation of one turn, with two continuations."""
        history = await self._converse(recorded, ["the question"])
        await self._converse(recorded, ["higher"], history)
        await self._converse(recorded, ["lower"], history)
        return await self._finished(recorded)

    async def _connected(self, recorded: RecordedRollout, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request was sent."""
        url, raw = urlsplit(recorded.base_url), json.dumps({"model": "policy", **body}).encode()
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {recorded.api_key}\r\nContent-Length: {len(raw)}\r\n\r\n"
        )

        def send() -> socket.socket:
            connection = socket.create_connection((url.hostname or "", url.port or 80), timeout=TIMEOUT_S)
            connection.sendall(head.encode() + raw)
            return connection

        return await asyncio.to_thread(send)

    def _trained_texts(self, row: Any) -> list[tuple[int, ...]]:
        """Runs of trained tokens of a row."""
        found: list[list[int]] = [[]]
        for token, trained in zip(row.tokens.tolist(), row.loss_mask.tolist(), strict=True):
            if trained:
                found[-1].append(token)
            elif found[-1]:
                found.append([])
        return [tuple(each) for each in found if each]


def _streamed(text: str) -> str:
    """The content of a stream of chat completions."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _read_all(connection: socket.socket) -> None:
    while b"[DONE]" not in connection.recv(1 << 16):
        pass


@cache
def _tokenizer() -> Any:
    """A tokenizer with merges, so that one text has several encodings."""
    with tempfile.TemporaryDirectory() as folder:
        return make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), TEXTS, Path(folder))
