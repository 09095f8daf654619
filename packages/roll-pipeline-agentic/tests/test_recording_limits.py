"""What a client may cost: connections without a key, long requests, and streams are bounded, and keys stay secret."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from roll_core.spec.config import DataArguments
from roll_pipeline_agentic import recording_server
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.recording import Limits, Recorder
from roll_pipeline_agentic.recording_dialects import DIALECTS
from roll_pipeline_agentic.recording_server import MAX_BODY, RecordingServer
from shared_tests.recording_conformance import ScriptedPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Endpoint:
    def __init__(self, server: RecordingServer, key: str, recorder: Recorder, encoder: ChatEncoder) -> None:
        self.key, self.recorder, self.encoder = key, recorder, encoder
        self.port = int(server.base_url.rpartition(":")[2].partition("/")[0])
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def post(self, body: Any, path: str = CHAT, *, key: str | None = None) -> tuple[int, str]:
        """Status and text of a reply."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
        writer.write(f"{head}Authorization: Bearer {self.key if key is None else key}\r\n\r\n".encode() + raw)
        text = (await reader.read()).decode()
        return int(text.split(" ", 2)[1]), text


@asynccontextmanager
async def endpoint(tokenizer: Any, *replies: str, tokens: int = 500) -> AsyncIterator[Endpoint]:
    encoder = ChatEncoder(tokenizer, DataArguments(template="plain"), where="test")
    limits = Limits(calls=9, reply_tokens=5000, tokens=tokens)
    recorder = Recorder(ScriptedPolicy(tokenizer, replies), encoder, limits, key="0/0")
    server = RecordingServer()
    await server.start()
    try:
        with server.session(recorder) as key:
            found = Endpoint(server, key, recorder, encoder)
            yield found
            for writer in found.writers:
                writer.close()
    finally:
        await recorder.finish()
        await server.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(limited())


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_leave_space_for_a_client(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))

    async def main() -> None:
        async with endpoint(tokenizer, "Four.") as on:
            idle = [await on.connect() for _ in range(50)]
            assert (await on.post(HI))[0] == 200
            assert await is_closed(idle[0][0])

    run(main)


def test_a_client_with_a_key_keeps_its_connection(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))

    async def main() -> None:
        async with endpoint(tokenizer, "Four.", "Five.") as on:
            reader, writer = await on.connect()
            for _ in range(2):
                writer.write(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: {on.key}\r\n\r\n".encode())
                assert b"200" in await reader.readline()
                await reader.readuntil(b"policy")
                for _ in range(9):
                    await on.connect()

    run(main)


@pytest.mark.parametrize(
    "sent", [b"", b"POST / HTTP/1.1\r\nHost: a\r\n", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"]
)
def test_a_connection_without_a_key_is_closed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(recording_server, "KEY_S", 0.2)
    monkeypatch.setattr(recording_server, "GRACE_S", 0.1)

    async def main() -> None:
        async with endpoint(tokenizer) as on:
            reader, writer = await on.connect()
            writer.write(sent)
            begin = time.monotonic()
            if sent.startswith(b"GET"):
                assert b"401" in await reader.readline()
                with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                    await reader.readuntil(b"no such text")
            else:
                assert await is_closed(reader)
            assert time.monotonic() - begin < 10

    run(main)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_large_body_has_its_own_status(tokenizer: Any, dialect: Any) -> None:
    async def main() -> None:
        async with endpoint(tokenizer) as on:
            body = b" " * (MAX_BODY + 1)
            assert (await on.post(body, dialect.path, key="another"))[0] == 401
            assert (await on.post(body, dialect.path))[0] == 413
            assert (await on.post({**HI, "input": "hi", "max_tokens": 5}, dialect.path))[0] == 200

    run(main)


def test_malformed_requests_leave_no_key_in_the_log(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with endpoint(tokenizer) as on:
            key = f"Authorization: Bearer {on.key}"
            for request in (
                f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{key}\r\n folded: {on.key}\r\n\r\n",
                f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{key}\x00\r\n\r\n",
                f"{key}\r\n\r\n",
                f"GET /v1/models HTTP/1.1\r\n{'a' * 9000}: {on.key}\r\n\r\n",
                f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n{key}\r\nContent-Length: -1\r\n\r\n",
                f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n{key}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            ):
                reader, writer = await on.connect()
                writer.write(request.encode())
                line = await asyncio.wait_for(reader.readline(), 10)
                assert b" 400 " in line, request
            assert on.key not in caplog.text
            assert (await on.post(HI))[0] == 200

    run(main)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a" * 100_000}],
        [{"role": "user", "content": "a"}] * 600,
        [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "1", "content": "b" * 100_000}],
    ],
)
def test_request_that_cannot_fit_is_refused_before_rendering(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, messages: list[Any]
) -> None:
    rendered = []

    async def main() -> None:
        async with endpoint(tokenizer) as on:
            monkeypatch.setattr(on.encoder, "encode", lambda *given: rendered.append(given))
            status, text = await on.post({"messages": messages})
            assert (status, "context_length_exceeded" in text) == (400, True)
            assert on.recorder.truncated

    run(main)
    assert not rendered


def test_other_rollouts_continue_while_a_request_is_encoded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.") as on:
            encode, longest, at = on.encoder.encode, 0.0, time.monotonic()

            def slowly(*given: Any) -> Any:
                time.sleep(1.0)
                return encode(*given)

            monkeypatch.setattr(on.encoder, "encode", slowly)
            posted = asyncio.ensure_future(on.post(HI))
            while not posted.done():
                await asyncio.sleep(0.01)
                longest, at = max(longest, time.monotonic() - at), time.monotonic()
            assert (await posted)[0] == 200
            assert longest < 0.9

    run(main)


def test_a_stream_decodes_tokens_a_bounded_number_of_times(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = "word " * 800
    decoded = []

    async def main() -> None:
        async with endpoint(tokenizer, reply, tokens=9000) as on:
            settled = on.encoder.settled

            def counted(ids: Any, *given: Any) -> Any:
                decoded.append(len(ids))
                return settled(ids, *given)

            monkeypatch.setattr(on.encoder, "settled", counted)
            status, text = await on.post({**HI, "stream": True})
            assert status == 200
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == reply

    run(main)
    assert len(decoded) > 20
    assert sum(decoded) < 66 * len(reply)  # one for each token would be 2,000 times its length


def test_a_refused_request_does_not_count(tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with endpoint(tokenizer, "Four.", tokens=60) as on:
            long = {"messages": [{"role": "user", "content": "a" * 60}]}
            assert (await on.post(long))[0] == 400
            example = [*HI["messages"], {"role": "assistant", "content": "ho"}, *HI["messages"]]
            assert (await on.post({"messages": example}))[0] == 200
            assert not on.recorder.problem
            assert on.recorder.idle_s() >= 0

    run(main)
