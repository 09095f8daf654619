"""The HTTP endpoint of agents: three APIs over the recorders of the running rollouts, and completions for harnesses.

    client ── api key ──► Recorder of the rollout ── Call ──► replies
      │                                                          │
      └──◄── response or server-sent events ◄────────────────────┘ then the call counts as delivered

Each rollout has a secret of its own, which expires with it. A stream begins with the first token that the client may
see; until then an error has a status of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import secrets
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_pipeline_agentic.completions import PATH
from roll_pipeline_agentic.recording import RequestError, off_loop
from roll_pipeline_agentic.recording_dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from aiohttp import web

    from roll_core.spec.environment import Message
    from roll_pipeline_agentic.completions import Completions
    from roll_pipeline_agentic.recording import Call, ChatReply, ChatRequest, Recorder
    from roll_pipeline_agentic.recording_dialects import Dialect, Event, ReplyStream

log = logging.getLogger(__name__)

MAX_BODY = 1 << 24
"""Maximum bytes of a request."""
KEY_S, GRACE_S = 10.0, 1.0
"""Seconds in which a new connection sends its first request, with a valid key. The second number lets a loop that was
blocked read what has arrived meanwhile."""
KEEPALIVE_S = 75.0
"""Seconds after which a connection without a request is closed."""
MAX_CONNECTIONS = 1 << 13
"""Maximum number of connections, if the limit of open files allows them."""


class RecordingServer:
    """The endpoint of one run. Lives on the driver's event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, url: str = "") -> None:
        """`port` 0: a free one. `url` is the address for agents if they reach the endpoint by another one."""
        self._host, self._port, self._url = host, port, url
        self._recorders: dict[str, Recorder] = {}
        self._completions: dict[Recorder, Completions] = {}
        """Completions of the rollouts that have them."""
        self._connections = _Connections(_max_connections())
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    @property
    def base_url(self) -> str:
        """Address for agents, which ends with `/v1`."""
        return self._url

    def check(self) -> None:
        """Raise `UnsupportedError` if the address cannot be used."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            socket.create_server((self._host, self._port), family=family).close()
        except OSError as error:
            raise UnsupportedError(
                f"agent_endpoint cannot listen on {self._host} port {self._port}: {error}: set another host, or port 0"
                " for a free one"
            ) from error

    async def start(self) -> None:
        """Listen, unless it does already. Raises `OSError` if the address is in use."""
        async with self._starting:
            if self._runner is None:
                await self._listen()

    async def _listen(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY)
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, self._handler(dialect, partial(self._answer, dialect)))
        app.router.add_post(PATH, self._handler(DIALECTS[0], self._complete))
        app.router.add_get("/v1/models", self._models)
        # A handler whose client disconnects is cancelled; its call continues.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_SILENT,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        http = cast("Callable[[], asyncio.Protocol]", runner.server)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Admission(http(), self._connections),
            self._host,
            self._port,
            backlog=max(1, self._connections.limit // 4),  # accepted at once, before any can be closed
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = self._url or f"http://{host}:{self._server.sockets[0].getsockname()[1]}/v1"
        self._runner = runner
        log.info("agents reach the policy at %s", self._url)

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def session(self, recorder: Recorder, completions: Completions | None = None) -> Iterator[str]:
        """A new secret, with which requests reach the recorder, and `completions`, until the context ends."""
        secret = f"roll-{secrets.token_urlsafe(24)}"
        self._recorders[secret] = recorder
        if completions is not None:
            self._completions[recorder] = completions
        try:
            yield secret
        finally:
            del self._recorders[secret]
            self._completions.pop(recorder, None)

    def _recorder(self, request: web.Request) -> Recorder:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        recorder = self._recorders.get(request.headers.get("x-api-key") or bearer)
        if recorder is None:
            message = "the API key belongs to no running rollout"
            raise RequestError(message, status=401, kind="authentication_error", code="invalid_api_key")
        self._connections.has_key(request.transport)
        return recorder

    async def _models(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            self._recorder(request)
        except RequestError as error:
            return web.json_response(DIALECTS[0].error(error), status=error.status)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "roll"}
        return web.json_response({"object": "list", "data": [model]})

    def _handler(self, dialect: Dialect, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            try:
                return await answer(request)
            except web.HTTPRequestEntityTooLarge:
                error = RequestError(
                    f"the body has more than {MAX_BODY} bytes", status=413, kind="request_too_large", code="too_large"
                )
                return web.json_response(dialect.error(error), status=error.status)
            except RequestError as error:
                return web.json_response(dialect.error(error), status=error.status)
            except ConnectionError as error:  # the client disconnected
                raise asyncio.CancelledError from error
            except Exception as error:
                log.info("a call of an agent failed", exc_info=error)
                failure = _policy_failed(error)
                # Clients repeat a failed request; here it would fail again.
                return web.json_response(dialect.error(failure), status=500, headers={"x-should-retry": "false"})

        return handle

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        recorder = self._recorder(request)
        raw = await request.read()
        body, parsed, digest = await off_loop(_read, dialect, raw, recorder.conversations)
        call = recorder.begin(
            parsed,
            digest=digest,
            key=request.headers.get("Idempotency-Key", ""),
            retried=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )
        id = f"{call.digest[:8]}{call.number:04x}"

        async def replies() -> list[ChatReply]:
            results = await asyncio.shield(call.task)
            carried = parsed.messages[1 if body.get("instructions") else 0 :]
            recorder.conversations[f"resp_{id}"] = [*carried, *(result.message for result in results)]
            return results

        call.connections += 1
        try:
            if parsed.stream:
                return await self._stream(request, call, dialect.stream(id, body), replies)
            payload = json.dumps(dialect.reply(id, body, await replies())).encode()
            response = await self._begin(request, call, "application/json")
            await response.write(payload)
            return await self._end(response, call)
        finally:
            call.connections -= 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        completions = self._completions.get(self._recorder(request))
        if completions is None:
            raise RequestError("completions are for evaluation harnesses: send messages", status=404, code="not_found")
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        return web.json_response(await completions.reply(body))

    async def _stream(
        self, request: web.Request, call: Call, stream: ReplyStream, replies: Callable[[], Awaitable[list[ChatReply]]]
    ) -> web.StreamResponse:
        """Write replies while they are generated. The first bytes are those of the first token."""
        response: web.StreamResponse | None = None
        while not call.task.done():
            progressed = call.progressed
            if events := [*stream.progress(call.parts)]:
                response = response or await self._begin(request, call, "text/event-stream")
                await response.write(_encoded(events))
            await asyncio.wait(
                [call.task, cast("asyncio.Future[Any]", progressed)], return_when=asyncio.FIRST_COMPLETED
            )
        try:
            events = [*stream.end(await replies())]
        except Exception as error:
            if response is None:
                raise
            await response.write(_encoded(stream.failed(_policy_failed(error))))
            await response.write_eof()
            return response
        response = response or await self._begin(request, call, "text/event-stream")
        await response.write(_encoded(events))
        return await self._end(response, call)

    async def _begin(self, request: web.Request, call: Call, kind: str) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(request)
        call.begun = True
        return response

    async def _end(self, response: web.StreamResponse, call: Call) -> web.StreamResponse:
        """Count the call as delivered: all bytes are on their way."""
        await response.write_eof()
        call.delivered = True
        return response


def _read(dialect: Dialect, raw: bytes, conversations: Mapping[str, Sequence[Message]]) -> tuple[Any, ChatRequest, str]:
    """A request's body, what it asks for, and its digest. Raises `RequestError`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    digest = hashlib.blake2b(dialect.path.encode() + raw, digest_size=16).hexdigest()
    return body, dialect.parse(body, conversations), digest


def _policy_failed(error: BaseException) -> RequestError:
    return RequestError(f"the policy could not reply: {error}", status=500, kind="api_error")


def _encoded(events: Iterable[Event]) -> bytes:
    stream = ""
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        stream += f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n"
    return stream.encode()


# -- connections -------------------------------------------------------------------------------------------------------


_SILENT = logging.getLogger(f"{__name__}.http")
"""aiohttp's logger. Its records about malformed requests quote their headers, and with them the API key. The handlers
log failures of calls themselves."""
_SILENT.disabled = True


def _max_connections() -> int:
    """Half of the process's open files: the other half is for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class _Connections:
    """The open connections. Any process of the machine can open one, but only a rollout's agent has a key."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._without_key: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Connections that sent no valid key so far, oldest first, with the timers that close them."""
        self._with_key: set[asyncio.BaseTransport] = set()

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a connection, if there is space: the oldest one without a key is closed for it."""
        if len(self._without_key) + len(self._with_key) >= self.limit:
            oldest = next(iter(self._without_key), None)
            if oldest is None:
                log.warning("the endpoint has %d connections, its maximum: raise the limit of open files", self.limit)
                return False
            self._close(cast("asyncio.Transport", oldest))
        loop = asyncio.get_running_loop()
        self._without_key[transport] = loop.call_later(KEY_S, self._close_soon, transport)
        return True

    def has_key(self, transport: asyncio.BaseTransport | None) -> None:
        """Keep a connection: it sent a valid key."""
        if transport is not None and (timer := self._without_key.pop(transport, None)):
            timer.cancel()
            self._with_key.add(transport)

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Remove a closed connection from both lists."""
        self._with_key.discard(transport)
        if timer := self._without_key.pop(transport, None):
            timer.cancel()

    def _close_soon(self, transport: asyncio.Transport) -> None:
        self._without_key[transport] = asyncio.get_running_loop().call_later(GRACE_S, self._close, transport)

    def _close(self, transport: asyncio.Transport) -> None:
        self.closed(transport)
        transport.abort()


class _Admission(asyncio.Protocol):
    """Passes on a connection to the HTTP protocol, unless there are too many."""

    def __init__(self, http: asyncio.Protocol, connections: _Connections) -> None:
        self._http, self._connections = http, connections
        self._transport: asyncio.Transport | None = None
        """None if the connection was refused."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast("asyncio.Transport", transport)
        if self._connections.opened(opened):
            self._transport = opened
            self._http.connection_made(opened)
        else:
            opened.abort()

    @override
    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._http.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        return None if self._transport is None else self._http.eof_received()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.closed(self._transport)
            self._http.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        if self._transport is not None:
            self._http.pause_writing()

    @override
    def resume_writing(self) -> None:
        if self._transport is not None:
            self._http.resume_writing()
