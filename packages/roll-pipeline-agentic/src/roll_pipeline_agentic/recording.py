"""Records the calls of one rollout's agent, token by token.

    request ── messages ──► longest recorded conversation ── ChatEncoder.extend ──► prompt ids ──► context.generate
                                                          └─ None: encode all ─┘                        │
    reply ◄── text, tool calls ◄────────────────────────────────────────────────── sampled ids ◄────────┘
                                                                                   TurnRecord

A conversation that ends with a recorded reply continues with the recorded ids; only the new messages are encoded. Turns
are linked by their tokens: the parent of a turn is the longest recorded sequence with which its prompt begins.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from roll_core.data.rollouts import path_to, tokens_of
from roll_core.errors import DataError
from roll_core.types import Rollout, TurnRecord
from roll_pipeline_agentic.calls import digest_of, state_of
from roll_pipeline_agentic.tool_calls import SettledParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.environment import Message, State
    from roll_core.spec.rollout import RolloutContext
    from roll_core.types import CompletionOutput, Media, TokenIds
    from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat


Result = TypeVar("Result")
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
CLIENT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Sampling parameters of requests that engines have by the same name."""
STREAM_GROWTH = 1 / 64
"""Share by which a reply grows before a stream shows more of it."""


class RequestError(Exception):
    """A request that the endpoint rejects, as an HTTP status, a type and a code of OpenAI's API, and a message."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid_request_error", code: str = "") -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


class LimitReached(RequestError):
    """A call beyond a limit of the rollout, which then counts as truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A call, in any dialect, with messages and tools in the format of OpenAI's chat completions."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the run's own replace."""
    stream: bool = False
    """True if the client receives parts of the reply while it is generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A reply of the policy."""

    message: Message
    """`content`, and if the policy wrote them `tool_calls` and `reasoning_content`."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None
    """The stop string of the request that ended the reply. It is not part of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a rollout."""

    calls: int
    """Maximum number of calls. A call with n > 1 counts n times."""
    reply_tokens: int
    """Maximum number of tokens of a reply."""
    tokens: int
    """Maximum number of tokens of a conversation."""
    sampled_tokens: int | None = None
    """Maximum number of sampled tokens of all calls."""


@dataclass(eq=False, slots=True)
class Call:
    """A request and its replies. Repeated requests share it. It continues if its clients disconnect."""

    digest: str
    number: int
    """Number of the call in its rollout."""
    task: asyncio.Task[list[ChatReply]]
    num_shown: list[int] = field(default_factory=list)
    """Tokens of each streamed reply that `parts` contain."""
    parts: list[SettledParts] = field(default_factory=list)
    """Parts of each streamed reply so far, which further tokens do not change."""
    progressed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done as soon as `parts` change; then there is a new one."""
    turns: list[int] = field(default_factory=list)
    """Turns that it sampled."""
    connections: int = 0
    """Clients that wait for the replies or receive them."""
    delivered: bool = False
    """True once the replies were written completely to a connection."""
    begun: bool = False
    """True once a part of the replies was written."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A conversation that ends with a recorded reply."""

    chat: EncodedChat
    turn: int


NUM_THREADS = 4


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, "recorder")


async def off_loop(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a thread of the recorders.

    Not by `asyncio.to_thread`: agents may block all of its threads with requests that wait for the recorders.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads(), partial(function, *arguments))


class Recorder:
    """The calls of one attempt of one rollout. Lives on the driver's event loop."""

    def __init__(
        self,
        context: RolloutContext,
        encoder: ChatEncoder,
        limits: Limits,
        *,
        key: str,
        unrecorded_replies: Literal["fail", "allow"] = "fail",
        clients_sample: bool = False,
    ) -> None:
        """`key` precedes the numbers of the calls in the keys of `context.generate`. With `clients_sample`, sampling
        parameters of requests replace the run's own, as far as engines have them."""
        self._context, self._encoder, self._limits, self._key = context, encoder, limits, key
        self._unrecorded_replies, self._clients_sample = unrecorded_replies, clients_sample
        self._calls: list[Call] = []
        self._by_key: dict[str, Call] = {}
        """Calls by idempotency key."""
        self._turns: list[TurnRecord] = []
        self._sequences: list[tuple[TokenIds, tuple[Media, ...]]] = []
        """Prompt and sampled tokens of each turn, and their images."""
        self._replies: dict[str, _Reply] = {}
        """Recorded replies by the digest of the conversation that ends with them."""
        self._known: set[str] = set()
        """Digests of the assistant messages that were sampled here or given with the first call."""
        self._num_prompts = self._num_started = self._num_outputs = self._num_running = 0
        self.problem = ""
        """Why the record is incomplete; empty if it is complete."""
        self.truncated = False
        """True if a limit refused a call."""
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        """Error of the run, not of the agent: the engine failed."""
        self.failed = asyncio.Event()
        """Set together with `error`; wakes the caller of the agent."""
        self.last_reply = ""
        """Text of the last reply."""
        self.conversations: dict[str, list[Message]] = {}
        """Messages by the id of a response that ended them, for `previous_response_id`."""
        self._idle_s, self._idle_since = 0.0, asyncio.get_running_loop().time()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def begin(self, request: ChatRequest, *, digest: str, key: str = "", retried: bool = False) -> Call:
        """The call of a request: a new one, or for a repeated request the earlier one.

        `digest` is that of the request's body, `key` its idempotency key. A client that repeats a request sets
        `retried`. Without either, a request is repeated if an equal one was not delivered. Raises `RequestError` if
        another body has the same key.
        """
        if key and (known := self._by_key.get(key)):
            if known.digest != digest:
                raise RequestError(f"idempotency key {key!r} was used for another request", status=422)
            return known
        if repeated := self._repeated(digest, retried=retried):
            self.counts["repeated_calls"] += 1
            return repeated
        call = Call(digest, len(self._calls), asyncio.ensure_future(self._generate(request)))
        call.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if no client waits
        self._calls.append(call)
        if key:
            self._by_key[key] = call
        return call

    def _repeated(self, digest: str, *, retried: bool) -> Call | None:
        same = [call for call in reversed(self._calls) if call.digest == digest and not _was_refused(call)]
        lost = [call for call in same if not call.delivered and not call.connections]
        return next(iter(lost or (same if retried else [])), None)

    async def _generate(self, request: ChatRequest) -> list[ChatReply]:
        """Sample the replies to a request and record them."""
        self._count_running(1)
        try:
            try:
                chat, budget, begin, continued = await self._prompt(request)
            except DataError as error:
                raise RequestError(str(error)) from error
            number, params = self._num_started, self._context.params
            self._num_started += 1
            call = next(call for call in self._calls if call.task is asyncio.current_task())
            try:
                completion = await self._context.generate(
                    chat.ids,
                    n=request.n,
                    media=chat.media,
                    params=replace(
                        params,
                        max_new_tokens=budget,
                        stop=(*params.stop, *request.stop),
                        **self._sampling(request),
                    ),
                    key=f"{self._key}/{number}",
                    on_progress=partial(self._progress, call, request, chat) if request.stream else None,
                )
                state = state_of(None, request.messages[begin:])
                return [
                    self._record(call, request, chat, choice, output, continued, state)
                    for choice, output in enumerate(completion.outputs)
                ]
            except Exception as error:  # of the engine or the runtime
                self.fail(error)
                raise
        finally:
            self._count_running(-1)

    def _progress(
        self, call: Call, request: ChatRequest, chat: EncodedChat, outputs: Sequence[CompletionOutput | None]
    ) -> None:
        """Show the clients of a stream what further tokens do not change.

        A reply is decoded again only after it grew by a share, so that all times take time linear in its length.
        """
        call.parts = call.parts or [SettledParts("", "")] * len(outputs)
        call.num_shown = call.num_shown or [0] * len(outputs)
        before = list(call.parts)
        for index, output in enumerate(outputs):
            if output is None or len(output.token_ids) <= (1 + STREAM_GROWTH) * call.num_shown[index]:
                continue
            call.num_shown[index] = len(output.token_ids)
            settled = self._encoder.settled(output.token_ids, chat, request.stop)
            if settled.extends(before[index]):
                call.parts[index] = settled
        if call.parts != before:
            progressed, call.progressed = call.progressed, asyncio.get_running_loop().create_future()
            progressed.set_result(None)

    async def _prompt(self, request: ChatRequest) -> tuple[EncodedChat, int, int, int | None]:
        """The encoded conversation, the maximum number of new tokens, and the turn whose reply it continues.

        The third value is the number of messages up to that reply. The request counts from here on, unless it fails.
        """
        messages = request.messages
        if not messages or messages[-1].get("role") == "assistant":
            raise RequestError("the last message is the assistant's: the endpoint does not continue replies")
        if self._num_outputs + request.n > self._limits.calls:
            self.truncated = True
            raise LimitReached(f"the rollout has {self._limits.calls} calls, its maximum", code="max_turns")
        if (least := max(len(messages), self._encoder.least_tokens(messages))) > self._limits.tokens:
            raise self._too_long(f"at least {least}")
        first, self._num_prompts = not self._num_prompts, self._num_prompts + 1
        self._num_outputs += request.n
        try:
            # Rendering and encoding a long conversation takes seconds, in which the loop serves all other episodes.
            states = await off_loop(_digests, messages, request.tools)
            known = [
                (index + 1, self._replies[digest]) for index, digest in enumerate(states) if digest in self._replies
            ]
            begin, reply = known[-1] if known else (0, None)
            self._check_replies(messages[begin:], first=first)
            chat = await off_loop(self._encoded, reply, messages[begin:], request.tools)
            budget = self._budget(request, chat)
        except BaseException:
            self._num_prompts -= 1
            self._num_outputs -= request.n
            raise
        for name in request.sampling.keys() - self._sampling(request).keys():
            self.counts[f"replaced_{name}"] += 1
        return chat, budget, begin, None if reply is None else reply.turn

    def _sampling(self, request: ChatRequest) -> dict[str, Any]:
        """Sampling parameters of a request that replace the run's own. Raises `RequestError`."""
        values = {name: request.sampling[name] for name in CLIENT_SAMPLING if name in request.sampling}
        for name, value in values.items() if self._clients_sample else ():
            number = int if name in ("top_k", "seed") else (int, float)
            if isinstance(value, bool) or not isinstance(value, number):
                raise RequestError(f"{name} is {value!r:.40}, expected a number")
        return values if self._clients_sample else {}

    def _encoded(
        self, reply: _Reply | None, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> EncodedChat:
        """The conversation of the messages, which continue a recorded reply if there is one. Runs in a thread."""
        if reply is None:
            self._encoder.check_tools(messages, tools)
            return self._encoder.encode(messages, tools)
        before, ids = reply.chat, self._turns[reply.turn].sampled_ids
        extended = self._encoder.extend(before, ids, messages)
        history = (*before.messages, self._encoder.reply(ids, before), *messages)
        return extended or self._encoder.encode(history, before.tools)

    def _budget(self, request: ChatRequest, chat: EncodedChat) -> int:
        """Maximum number of new tokens. Raises `LimitReached` if there is none."""
        limits = self._limits
        budget = min(limits.reply_tokens, limits.tokens - len(chat.ids), request.max_tokens or limits.tokens)
        if limits.sampled_tokens is not None:
            left = limits.sampled_tokens - sum(len(turn.sampled_ids) for turn in self._turns)
            if left <= 0:
                self.truncated = True
                raise LimitReached(
                    f"the rollout has {limits.sampled_tokens} sampled tokens, its maximum", code="max_tokens"
                )
            budget = min(budget, left)
        if budget <= 0:
            raise self._too_long(str(len(chat.ids)))
        return budget

    def _too_long(self, number: str) -> LimitReached:
        self.truncated = True
        return LimitReached(
            f"the conversation has {number} tokens, and may have {self._limits.tokens} with the reply",
            code="context_length_exceeded",
        )

    def _check_replies(self, messages: Sequence[Message], *, first: bool) -> None:
        """Find assistant messages that were not sampled here. Those of the first call are examples of its prompt."""
        for message in messages:
            if message.get("role") != "assistant":
                continue
            digest = _digest(_canonical(message))
            if first:
                self._known.add(digest)
            elif digest not in self._known:
                self._known.add(digest)
                self.counts["unrecorded_replies"] += 1
                if self._unrecorded_replies == "fail":
                    self.incomplete(
                        f"call {self._num_started + 1} has an assistant message that this endpoint did not generate:"
                        f" {str(message.get('content'))!r:.80}. The agent called another model or changed a reply; set"
                        " unrecorded_replies: allow to read such messages as context"
                    )

    def _record(
        self,
        call: Call,
        request: ChatRequest,
        chat: EncodedChat,
        choice: int,
        output: CompletionOutput,
        continued: int | None,
        state: State,
    ) -> ChatReply:
        """Record the output `choice` of a call as a turn, and convert it to a reply."""
        if not len(output.token_ids) or output.finish_reason == "abort":
            number = len(output.token_ids)
            self.incomplete(f"the engine returned a response of {number} tokens ({output.finish_reason})")
        parent = self._parent(chat, continued)
        rollout = Rollout(turns=tuple(self._turns))
        turn = record_turn(output, chat.ids, rollout, parent, media=chat.media, state=state)
        index = len(self._turns)
        self._turns.append(turn)
        self._sequences.append((np.concatenate([chat.ids, output.token_ids]), chat.media))
        call.turns.append(index)
        message = self._message(output.token_ids, chat)
        sent = call.parts[choice] if call.parts else SettledParts("", "")
        if not _parts(message).extends(sent):  # a later </think> made reasoning of content that was streamed
            message = {"role": "assistant", "content": self._encoder.reply_text(output.token_ids)}
        stop = next((stop for stop in request.stop if stop in str(message["content"])), None)
        if stop is not None:
            message["content"] = str(message["content"]).partition(stop)[0]
        if not _parts(message).extends(sent):
            self.incomplete(f"the reply {message['content']!r:.80} does not begin as its stream: {sent.content!r:.80}")
        conversation = _digests([*request.messages, message], request.tools)[-1]
        self._replies[conversation] = _Reply(chat, index)
        self._known.add(_digest(_canonical(message)))
        self.last_reply = str(message["content"] or "")
        reason: FinishReason = "length" if output.finish_reason == "length" else "stop"
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if reason == "stop" and message.get("tool_calls") else reason,
            prompt_tokens=len(chat.ids),
            completion_tokens=len(output.token_ids),
            stop=stop,
        )

    def _message(self, ids: TokenIds, chat: EncodedChat) -> dict[str, Any]:
        """A reply with its tool calls and reasoning apart from its content."""
        parsed = self._encoder.parse(ids, chat)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        return message

    def _parent(self, chat: EncodedChat, continued: int | None) -> int | None:
        """The turn whose whole sequence is the longest beginning of the ids and images of `chat`."""
        parent, length, ids = None, 0, chat.ids
        for index, (sequence, media) in enumerate(self._sequences):
            longer = len(sequence) > length or (len(sequence) == length and index == continued)
            fits = longer and len(sequence) <= len(ids) and np.array_equal(ids[: len(sequence)], sequence)
            if fits and begins_with(chat.media, media):
                parent, length = index, len(sequence)
        return parent

    @property
    def exhausted(self) -> bool:
        """True if no call is left."""
        return self._num_outputs >= self._limits.calls

    def expect(self, text: str) -> None:
        """Accept an assistant message that was not sampled here: the agent composed it."""
        self._known.add(_digest(_canonical({"role": "assistant", "content": text})))

    def fail(self, error: BaseException) -> None:
        """End the run with an error of the engine or the runtime."""
        self.error = self.error or error
        self.failed.set()

    # -- the rollout ---------------------------------------------------------------------------------------------------

    def incomplete(self, problem: str) -> None:
        """Exclude the rollout from training, for the first reason given."""
        self.problem = self.problem or problem

    async def finish(self) -> Rollout:
        """Cancel calls in progress and return the recorded turns.

        Turns that the agent never received are left out, unless later ones continue them.
        """
        for call in self._calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._calls), return_exceptions=True)
        for call in self._calls:
            if call.begun and not call.delivered:
                self.incomplete("a connection closed in the middle of a reply, and the request was not repeated")
        recorded = {turn for call in self._calls if call.delivered for turn in call.turns}
        for index in sorted(recorded, reverse=True):  # a copy: parents join the set meanwhile
            parent = self._turns[index].parent
            while parent is not None:
                recorded.add(parent)
                parent = self._turns[parent].parent
        self.counts["undelivered_turns"] += len(self._turns) - len(recorded)
        place = {index: position for position, index in enumerate(sorted(recorded))}
        turns = [self._turns[index] for index in sorted(recorded)]
        parents = [None if turn.parent is None else place[turn.parent] for turn in turns]
        return Rollout(turns=tuple(replace(turn, parent=parent) for turn, parent in zip(turns, parents, strict=True)))

    def idle_s(self) -> float:
        """Seconds in which no call was in progress."""
        now = asyncio.get_running_loop().time()
        return self._idle_s if self._num_running else self._idle_s + now - self._idle_since

    def _count_running(self, change: int) -> None:
        if not self._num_running:
            self._idle_s = self.idle_s()
        self._num_running += change
        self._idle_since = asyncio.get_running_loop().time()


def _was_refused(call: Call) -> bool:
    """True if the call ended with an error, so that an equal request is a new call."""
    return call.task.done() and (call.task.cancelled() or call.task.exception() is not None)


def _parts(message: Message) -> SettledParts:
    return SettledParts(str(message.get("reasoning_content", "")), str(message["content"]))


def _digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Digest of the conversation up to and including each message."""
    digests, digest = [], _digest(list(tools))
    for message in messages:
        digest = _digest([digest, _canonical(message)])
        digests.append(digest)
    return digests


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True).encode())


def _canonical(message: Message) -> list[Any]:
    """What of a message clients keep when they send it again: role, content, names and arguments of tool calls, images.

    Clients add keys, drop reasoning, rename ids, and strip blanks around a reply.
    """
    role, content = message.get("role"), message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], _parsed(function["arguments"])) for function in functions]
    digests = [[media.digest for media in message["media"]]] if message.get("media") else []
    return [role, content.strip() if role == "assistant" else content, calls, *digests]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def begins_with(media: Sequence[Media], first: Sequence[Media]) -> bool:
    """True if the images `media` begin with the images `first`."""
    return [image.digest for image in media[: len(first)]] == [image.digest for image in first]


def record_turn(
    output: CompletionOutput,
    prompt_ids: TokenIds,
    rollout: Rollout,
    parent: int | None,
    *,
    media: Sequence[Media] = (),
    **fields: Any,
) -> TurnRecord:
    """Record an output that was generated from `prompt_ids` with their images `media`.

    They begin with the sequence of `parent` and its images. `fields` are further fields of the record. By default, all
    sampled tokens are in the loss mask. Raises `DataError` if the prompt does not begin with that sequence.
    """
    path = [] if parent is None else path_to(rollout, parent)
    known_media = [image for index in path for image in rollout.turns[index].media]
    known = np.zeros(0, dtype=np.int64) if parent is None else tokens_of(rollout, parent)
    num_known = len(known)
    if len(prompt_ids) <= num_known - (parent is not None) or not np.array_equal(prompt_ids[:num_known], known):
        raise DataError(
            f"the prompt of a turn has {len(prompt_ids)} tokens, which do not continue the {num_known} tokens of turn"
            f" {parent}: record it as a turn without a parent"
        )
    if not begins_with(media, known_media):
        raise DataError(
            f"the {len(media)} images of a turn do not begin with the {len(known_media)} images of turn {parent}:"
            " record it as a turn without a parent"
        )
    experts = output.routed_experts
    return TurnRecord(
        parent=parent,
        context_ids=prompt_ids[num_known:],
        media=tuple(media[len(known_media) :]),
        sampled_ids=output.token_ids,
        logprobs=output.logprobs,
        versions=output.versions,
        finish_reason=output.finish_reason,
        routed_experts=None if experts is None else experts[max(num_known - 1, 0) :],
        **{"loss_mask": np.ones(len(output.token_ids), dtype=np.bool_)} | fields,
    )
