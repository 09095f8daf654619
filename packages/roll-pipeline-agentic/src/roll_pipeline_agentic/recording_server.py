"""The HTTP endpoint of agents: three APIs over the recorders of the running rollouts.

    client ── api key ──► Recorder of the rollout ── Call ──► replies
      │                                                          │
      └──◄── response or server-sent events ◄────────────────────┘ then the call counts as delivered

Each rollout has a secret of its own, which expires with it. Replies are generated completely before the first byte of a
response, also of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_pipeline_agentic.recording import RequestError
from roll_pipeline_agentic.recording_dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

    from roll_pipeline_agentic.recording import Call, ChatReply, Recorder
    from roll_pipeline_agentic.recording_dialects import Dialect, Event

log = logging.getLogger(__name__)

MAX_BODY = 1 << 26
"""Maximum bytes of a request."""


class RecordingServer:
    """The endpoint of one run. Lives on the driver's event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, url: str = "") -> None:
        """`port` 0: a free one. `url` is the address for agents if they reach the endpoint by another one."""
        self._host, self._port, self._url = host, port, url
        self._recorders: dict[str, Recorder] = {}
        self._runner: web.AppRunner | None = None
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
            app.router.add_post(dialect.path, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        # A handler whose client disconnects is cancelled; its call continues.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = self._url or f"http://{host}:{runner.addresses[0][1]}/v1"
        self._runner = runner
        log.info("agents reach the policy at %s", self._url)

    async def close(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def session(self, recorder: Recorder) -> Iterator[str]:
        """A new secret, with which requests reach the recorder until the context ends."""
        secret = f"roll-{secrets.token_urlsafe(24)}"
        self._recorders[secret] = recorder
        try:
            yield secret
        finally:
            del self._recorders[secret]

    def _recorder(self, request: web.Request) -> Recorder:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        recorder = self._recorders.get(request.headers.get("x-api-key") or bearer)
        if recorder is None:
            message = "the API key belongs to no running rollout"
            raise RequestError(message, status=401, kind="authentication_error", code="invalid_api_key")
        return recorder

    async def _models(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            self._recorder(request)
        except RequestError as error:
            return web.json_response(DIALECTS[0].error(error), status=error.status)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "roll"}
        return web.json_response({"object": "list", "data": [model]})

    def _handler(self, dialect: Dialect) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            try:
                return await self._answer(dialect, request)
            except RequestError as error:
                return web.json_response(dialect.error(error), status=error.status)
            except ConnectionError:
                raise
            except Exception as error:
                log.info("a call of an agent failed", exc_info=error)
                failure = RequestError(f"the policy could not reply: {error}", status=500, kind="api_error")
                # Clients repeat a failed request; here it would fail again.
                return web.json_response(dialect.error(failure), status=500, headers={"x-should-retry": "false"})

        return handle

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        recorder = self._recorder(request)
        raw = await request.read()
        try:
            body: Any = json.loads(raw)
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        parsed = dialect.parse(body, recorder.conversations)
        call = recorder.begin(
            parsed,
            digest=hashlib.blake2b(dialect.path.encode() + raw, digest_size=16).hexdigest(),
            key=request.headers.get("Idempotency-Key", ""),
            retried=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )
        call.connections += 1
        try:
            replies = await asyncio.shield(call.task)
            id = call.digest[:8] + "".join(f"{turn:04x}" for turn in call.turns[:1])
            carried = parsed.messages[1 if body.get("instructions") else 0 :]
            recorder.conversations[f"resp_{id}"] = [*carried, *(each.message for each in replies)]
            return await self._write(dialect, request, call, id, body, replies)
        finally:
            call.connections -= 1

    async def _write(
        self, dialect: Dialect, request: web.Request, call: Call, id: str, body: Any, replies: list[ChatReply]
    ) -> web.StreamResponse:
        """Write the replies, and count the call as delivered once all bytes are on their way."""
        from aiohttp import web

        streams = bool(body.get("stream"))
        kind = "text/event-stream" if streams else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            if streams:
                for event in dialect.events(id, body, replies):
                    await response.write(_encoded(event))
            else:
                await response.write(json.dumps(dialect.reply(id, body, replies)).encode())
            await response.write_eof()
        except BaseException:  # the connection closed
            call.cut |= response.prepared
            raise
        call.delivered = True
        return response


def _encoded(event: Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()
