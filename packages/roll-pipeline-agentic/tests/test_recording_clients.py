"""The endpoint with the clients of OpenAI and Anthropic: plain and streamed replies, errors, retries, tools."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.types import Rollout
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.recording import Limits, Recorder
from roll_pipeline_agentic.recording_dialects import ChatCompletions
from roll_pipeline_agentic.recording_server import RecordingServer
from shared_tests.recording_conformance import ScriptedPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

openai: Any = None
anthropic: Any = None
httpx2: Any = None

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }} <tool_call> json</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def _clients() -> None:
    # Takes two seconds in the process that runs these tests, instead of in each that collects them.
    globals().update({name: pytest.importorskip(name) for name in ("openai", "anthropic", "httpx2")})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    config = TokenizerConfig(kind="byte")
    found = make_tokenizer(config, [], folder, control_tokens=SPECIAL)
    found.chat_template = TOOLS_TEMPLATE
    found.eos_token = "<|im_end|>"
    return found


class Endpoint:
    def __init__(self, base_url: str, key: str, recorder: Recorder, policy: ScriptedPolicy) -> None:
        self.recorder, self.policy = recorder, policy
        self.openai = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2)
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=base_url.removesuffix("/v1"), api_key=key, auth_token=None, max_retries=2
        )


@asynccontextmanager
async def endpoint(tokenizer: Any, *replies: str, calls: int = 9) -> AsyncIterator[Endpoint]:
    policy = ScriptedPolicy(tokenizer, replies)
    encoder = ChatEncoder(tokenizer, DataArguments(template="native"), where="test")
    recorder = Recorder(policy, encoder, Limits(calls=calls, reply_tokens=200, tokens=2000), key="0/0")
    server = RecordingServer()
    await server.start()
    try:
        with server.session(recorder) as secret:
            found = Endpoint(server.base_url, secret, recorder, policy)
            try:
                yield found
            finally:
                await found.openai.close()
                await found.anthropic.close()
    finally:
        await recorder.finish()
        await server.close()


def chain(rollout: Rollout) -> list[int | None]:
    return [turn.parent for turn in rollout.turns]


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


def called(function: dict[str, str]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(tokenizer: Any, stream: bool) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.", "Six.") as on:
            messages: list[Any] = [{"role": "developer", "content": "Be brief."}, user("2 + 2?")]
            for question in ("3 + 3?", ""):
                if stream:
                    options = {"include_usage": True}
                    chunks = [
                        each
                        async for each in await on.openai.chat.completions.create(
                            model="any", messages=messages, stream=True, stream_options=options
                        )
                    ]
                    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
                    usage = chunks[-1].usage
                else:
                    found = await on.openai.chat.completions.create(model="any", messages=messages, temperature=0.3)
                    assert found.choices[0].finish_reason == "stop"
                    messages.append(found.choices[0].message)
                    text, usage = found.choices[0].message.content, found.usage
                if stream:
                    messages.append({"role": "assistant", "content": text})
                messages.append(user(question))
                assert usage.completion_tokens == len(text) + 1
            assert text == "Six."
            assert chain(await on.recorder.finish()) == [None, 0]
            assert not on.recorder.problem
            assert on.recorder.counts["replaced_temperature"] == (0 if stream else 2)

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_responses(tokenizer: Any, stream: bool) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.", "Six.", "Eight.") as on:
            items: list[Any] = [user("2 + 2?")]
            if stream:
                async with on.openai.responses.stream(model="any", instructions="Be brief.", input=items) as events:
                    deltas = [each.delta async for each in events if each.type == "response.output_text.delta"]
                    first = await events.get_final_response()
                assert "".join(deltas) == "Four."
            else:
                first = await on.openai.responses.create(model="any", instructions="Be brief.", input=items)
            assert first.output_text == "Four."
            items += [*(each.model_dump(exclude_none=True) for each in first.output), user("3 + 3?")]
            second = await on.openai.responses.create(model="any", instructions="Be brief.", input=items)
            assert second.output_text == "Six."
            third = await on.openai.responses.create(
                model="any", instructions="Be brief.", input="4 + 4?", previous_response_id=second.id
            )
            assert third.output_text == "Eight."
            assert chain(await on.recorder.finish()) == [None, 0, 1]

    run(main())


def test_a_response_continues_the_system_messages_of_its_input(tokenizer: Any) -> None:
    """Only `instructions` are those of one request."""

    async def main() -> None:
        async with endpoint(tokenizer, "Four.", "Six.") as on:
            items: list[Any] = [{"role": "developer", "content": "Be brief."}, user("2 + 2?")]
            first = await on.openai.responses.create(model="any", input=items)
            await on.openai.responses.create(model="any", input="3 + 3?", previous_response_id=first.id)
            first = await on.openai.responses.create(model="any", instructions="Be polite.", input="5 + 5?")
            await on.openai.responses.create(model="any", input="6 + 6?", previous_response_id=first.id)
            assert chain(await on.recorder.finish()) == [None, 0, None, None]
            prompts = [tokenizer.decode(each.prompt_ids.tolist()) for each in on.policy.calls]
            assert ["brief" in each for each in prompts] == [True, True, False, False]
            assert ["polite" in each for each in prompts] == [False, False, True, False]

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_anthropic(tokenizer: Any, stream: bool) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.", "Six.STOP and more") as on:
            messages: list[Any] = [user("2 + 2?")]
            given = {"model": "any", "max_tokens": 50, "system": "Be brief.", "stop_sequences": ["STOP"]}
            for question in ("3 + 3?", ""):
                if stream:
                    async with on.anthropic.messages.stream(messages=messages, **given) as events:
                        found = await events.get_final_message()
                else:
                    found = await on.anthropic.messages.create(messages=messages, **given)
                messages += [{"role": "assistant", "content": found.content}, user(question)]
            assert found.content[0].text == "Six."
            assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "STOP")
            assert on.policy.params.stop == ()
            assert chain(await on.recorder.finish()) == [None, 0]

    run(main())


def test_the_stop_string_is_trained_and_not_shown(tokenizer: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Six.STOP", "Eight.") as on:
            messages: list[Any] = [user("3 + 3?")]
            for _ in range(2):
                found = await on.openai.chat.completions.create(model="any", messages=messages, stop="STOP")
                messages += [found.choices[0].message, user("next")]
            assert messages[1].content == "Six."
            rollout = await on.recorder.finish()
            assert chain(rollout) == [None, 0]
            assert "STOP" in tokenizer.decode(rollout.turns[0].sampled_ids)

    run(main())


def test_errors_are_those_of_the_clients(tokenizer: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, calls=1) as on:
            create = on.openai.chat.completions.create
            with pytest.raises(openai.AuthenticationError):
                await on.openai.with_options(api_key="x").models.list()
            assert [each.id async for each in on.openai.models.list()] == ["policy"]
            for given in (
                {"tool_choice": "required"},
                {"response_format": {"type": "json_object"}},
                {"logprobs": True},
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
                {"messages": []},
                {"n": 0},
                {"stop": [""]},
                {"stop": [1]},
                {"tools": ["weather"]},
                {"messages": [user("a"), called({"name": "weather"}), user("b")]},
                {"messages": [user("a"), called({"arguments": "{}"}), user("b")]},
                {"messages": [user("x" * 3000)]},
            ):
                with pytest.raises(openai.BadRequestError):
                    await create(**{"model": "any", "messages": [user("a")], **given})
            await create(model="any", messages=[user("a")])
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="any", messages=[user("a")])
            assert refused.value.code == "max_turns"
            with pytest.raises(anthropic.BadRequestError):
                await on.anthropic.messages.create(
                    model="any", max_tokens=5, messages=[user("a")], stop_sequences=["", "x"]
                )
            with pytest.raises(anthropic.BadRequestError):
                await on.anthropic.messages.create(model="any", max_tokens=5, messages=[user("a")])
            assert len(on.policy.calls) == 1
            assert on.recorder.error is None  # which would end the run

    run(main())


def test_a_client_that_times_out_repeats_its_request(tokenizer: Any) -> None:
    """The policy replies after the first attempt's deadline: the second attempt gets the same reply."""

    async def main() -> None:
        async with endpoint(tokenizer, "Four.") as on:
            on.policy.open.clear()
            request = asyncio.ensure_future(
                on.openai.with_options(timeout=0.5).chat.completions.create(model="any", messages=[user("2 + 2?")])
            )
            await asyncio.sleep(0.9)
            on.policy.open.set()
            assert (await request).choices[0].message.content == "Four."
            assert len(on.policy.calls) == 1
            assert on.recorder.counts["repeated_calls"] >= 1
            assert len((await on.recorder.finish()).turns) == 1

    run(main())


def test_an_idempotency_key_names_one_call(tokenizer: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "one", "two") as on:
            keyed = on.openai.with_options(default_headers={"Idempotency-Key": "k"}).chat.completions.create
            texts = [(await keyed(model="any", messages=[user("a")])).choices[0].message.content for _ in range(2)]
            assert texts == ["one", "one"]
            with pytest.raises(openai.UnprocessableEntityError):
                await keyed(model="any", messages=[user("b")])

    run(main())


def test_a_stream_that_breaks_makes_the_record_incomplete(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client got a part of the reply and did not repeat its request."""
    whole = ChatCompletions.stream

    def broken(*arguments: Any) -> Any:
        stream = whole(*arguments)

        def end(replies: Any) -> Any:
            raise ConnectionResetError

        stream.end = end  # type: ignore[method-assign]
        return stream

    monkeypatch.setattr(ChatCompletions, "stream", broken)

    async def main() -> None:
        async with endpoint(tokenizer, "Four.") as on:
            with pytest.raises((openai.APIError, httpx2.TransportError)):
                async for _ in await on.openai.chat.completions.create(
                    model="any", messages=[user("2 + 2?")], stream=True
                ):
                    pass
            assert not (await on.recorder.finish()).turns
            assert on.recorder.problem

    run(main())


REASONED = "<think>\nTwo and two.\n</think>\n\nLet me look.\n" + CALL


async def _streamed_by_chat(on: Endpoint) -> Any:
    tools = [{"type": "function", "function": WEATHER}]
    text, reasoning, calls = [], [], []
    async for chunk in await on.openai.chat.completions.create(
        model="any", messages=[user("a")], tools=tools, stream=True
    ):
        delta = chunk.choices[0].delta
        text += [delta.content] if delta.content else []
        reasoning += [more] if (more := getattr(delta, "reasoning_content", None)) else []
        calls += [(each.function.name, each.function.arguments) for each in delta.tool_calls or ()]
        yield text, reasoning, calls


async def _streamed_by_responses(on: Endpoint) -> Any:
    tools: Any = [{"type": "function", **WEATHER}]
    text, reasoning, calls = [], [], []
    async with on.openai.responses.stream(model="any", input=[user("a")], tools=tools) as events:
        async for each in events:
            text += [each.delta] if each.type == "response.output_text.delta" else []
            reasoning += [each.delta] if each.type == "response.reasoning_text.delta" else []
            if each.type == "response.output_item.done" and each.item.type == "function_call":
                calls.append((each.item.name, each.item.arguments))
            yield text, reasoning, calls
        final = await events.get_final_response()
        assert [each.type for each in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text == "".join(text)


async def _streamed_by_messages(on: Endpoint) -> Any:
    tool = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    text, reasoning, calls = [], [], []
    async with on.anthropic.messages.stream(model="any", max_tokens=200, messages=[user("a")], tools=[tool]) as events:
        async for each in events:
            text += [each.text] if each.type == "text" else []
            reasoning += [each.thinking] if each.type == "thinking" else []
            if each.type == "content_block_stop" and each.content_block.type == "tool_use":
                calls.append((each.content_block.name, json.dumps(each.content_block.input)))
            yield text, reasoning, calls
        final = await events.get_final_message()
        assert [each.type for each in final.content] == ["thinking", "text", "tool_use"]
        assert final.stop_reason == "tool_use"
        assert (final.usage.input_tokens, final.usage.output_tokens) == (
            len(on.policy.calls[0].prompt_ids),
            len(on.policy.calls[0].outputs[0].token_ids),
        )


@pytest.mark.parametrize("dialect", [_streamed_by_chat, _streamed_by_responses, _streamed_by_messages])
def test_stream_sends_reasoning_and_text_before_the_end(tokenizer: Any, dialect: Any) -> None:
    """Tokens arrive one by one; the tool call, which only its end makes valid, arrives at the end."""

    async def main() -> None:
        async with endpoint(tokenizer, REASONED) as on:
            on.policy.num_reported = REASONED.index("<tool_call>") + 20
            on.policy.open.clear()
            text, reasoning, calls = [], [], []
            async for text, reasoning, calls in dialect(on):  # noqa: B007
                if "".join(text) == "Let me look.":
                    assert calls == [] or on.policy.open.is_set()
                    on.policy.open.set()
            assert len(text) > 5
            assert len(reasoning) > 5
            assert "".join(reasoning) == "Two and two."
            assert "".join(text) == "Let me look."
            assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Ulm"})]
            assert len((await on.recorder.finish()).turns) == 1
            assert not on.recorder.problem

    run(main())


def test_a_stop_string_never_appears_in_a_stream(tokenizer: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Six STO and STOP") as on:
            texts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await on.openai.chat.completions.create(
                    model="any", messages=[user("a")], stop="STOP", stream=True
                )
            ]
            assert "".join(texts) == "Six STO and "
            assert len(texts) > 4
            assert not on.recorder.problem

    run(main())


def test_a_stray_end_of_reasoning_stays_in_a_streamed_reply(tokenizer: Any) -> None:
    """The client has the text before it already: the turn continues with the text that the client has."""

    async def main() -> None:
        async with endpoint(tokenizer, "One and two.</think>Three.", "Four.") as on:
            messages = [user("a")]
            texts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await on.openai.chat.completions.create(model="any", messages=messages, stream=True)
            ]
            assert "".join(texts) == "One and two.</think>Three."
            messages += [{"role": "assistant", "content": "".join(texts)}, user("b")]
            await on.openai.chat.completions.create(model="any", messages=messages)
            assert chain(await on.recorder.finish()) == [None, 0]
            assert not on.recorder.problem

    run(main())


def test_the_engine_fails_in_the_middle_of_a_stream(tokenizer: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.") as on:
            whole = on.policy.generate

            async def broken(*arguments: Any, on_progress: Any, **more: Any) -> Any:
                await whole(*arguments, on_progress=on_progress, **more)
                raise RuntimeError("replica is gone")

            on.policy.generate = broken  # type: ignore[method-assign]
            seen = []

            async def read() -> None:
                async for chunk in await on.openai.chat.completions.create(
                    model="any", messages=[user("a")], stream=True
                ):
                    seen.append(chunk.choices[0].delta.content or "")

            with pytest.raises(openai.APIError):
                await read()
            assert "".join(seen) == "Four."[: len("".join(seen))]
            assert seen
            assert on.recorder.failed.is_set()

    run(main())


def test_the_engine_fails(tokenizer: Any) -> None:
    """The error ends the run; the client does not repeat its request."""

    async def main() -> None:
        async with endpoint(tokenizer) as on:

            async def broken(*arguments: Any, **more: Any) -> Any:
                raise RuntimeError("replica is gone")

            on.policy.generate = broken  # type: ignore[method-assign]
            with pytest.raises(openai.InternalServerError):
                await on.openai.chat.completions.create(model="any", messages=[user("a")])
            assert isinstance(on.recorder.error, RuntimeError)
            assert on.recorder.failed.is_set()

    run(main())


def _chat(on: Endpoint) -> Callable[..., Any]:
    async def turn(messages: list[Any]) -> tuple[str, dict[str, Any], list[Any]]:
        tools = [{"type": "function", "function": WEATHER}]
        found = (await on.openai.chat.completions.create(model="any", messages=messages, tools=tools)).choices[0]
        if found.finish_reason != "tool_calls":
            return found.message.content, {}, []
        (call,) = found.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        return call.function.name, json.loads(call.function.arguments), [found.message, result]

    return turn


def _responses(on: Endpoint) -> Callable[..., Any]:
    async def turn(messages: list[Any]) -> tuple[str, dict[str, Any], list[Any]]:
        found = await on.openai.responses.create(model="any", input=messages, tools=[{"type": "function", **WEATHER}])
        calls = [each for each in found.output if each.type == "function_call"]
        if not calls:
            return found.output_text, {}, []
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
        return calls[0].name, json.loads(calls[0].arguments), [*(each.model_dump() for each in found.output), result]

    return turn


def _messages(on: Endpoint) -> Callable[..., Any]:
    async def turn(messages: list[Any]) -> tuple[str, dict[str, Any], list[Any]]:
        tool = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
        found = await on.anthropic.messages.create(model="any", max_tokens=200, messages=messages, tools=[tool])
        if found.stop_reason != "tool_use":
            return found.content[0].text, {}, []
        call = found.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        reply = {"role": "assistant", "content": found.content}
        return call.name, call.input, [reply, {"role": "user", "content": [result]}]

    return turn


@pytest.mark.parametrize("dialect", [_chat, _responses, _messages])
def test_tools(tokenizer: Any, dialect: Any) -> None:
    """The policy calls a tool, gets its result, and replies. The turns are one row."""

    async def main() -> None:
        async with endpoint(tokenizer, CALL, "Sunny.") as on:
            turn, messages = dialect(on), [user("Weather in Ulm?")]
            name, arguments, more = await turn(messages)
            assert (name, arguments) == ("weather", {"city": "Ulm"})
            text, _, _ = await turn([*messages, *more])
            assert text == "Sunny."
            rollout = await on.recorder.finish()
            assert chain(rollout) == [None, 0]
            assert "sunny" in tokenizer.decode(rollout.turns[1].context_ids)
            first, second = on.policy.calls
            known = np.concatenate([first.prompt_ids, first.outputs[0].token_ids])
            assert second.prompt_ids[: len(known)].tolist() == known.tolist()

    run(main())
