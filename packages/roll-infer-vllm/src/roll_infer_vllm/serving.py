"""OpenAI-compatible endpoint: vLLM's own server on the strategy's engine, with the same weights.

It runs on the worker's event loop, so HTTP requests reach the engine in the same way as the run's own requests. While
the engine is paused, for a weight update or for sleep, HTTP requests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from roll_core.errors import RollError
from roll_infer_vllm.versions import server_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

START_S = 60.0
POLL_S = 0.01


class EndpointServer:
    """HTTP server of one engine; create it on the event loop of the engine."""

    def __init__(self, name: str, host: str) -> None:
        """Serve the model under `name`, on address `host`."""
        self._name, self._host = name, host
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        """Base URL of the API, ending in `/v1`; empty while the server is not running."""

    def listen(self) -> None:
        """Bind a free port and listen; connections wait until `start`.

        Raises `RollError` if the address does not belong to this host.
        """
        try:
            self._socket = socket.create_server((self._host, 0))
        except OSError as error:
            raise RollError(f"{self._name}: cannot listen at endpoint_host {self._host}: {error}") from error

    async def start(self, engine: AsyncLLM, arguments: AsyncEngineArgs) -> None:
        """Start answering requests. Call after `listen`.

        Raises `RollError` if the server ends at once, and `TimeoutError` if it does not start within 60 s.
        """
        import uvicorn

        if self._socket is None:
            raise AssertionError("a server listens before it starts")

        class Uvicorn(uvicorn.Server):  # type: ignore[misc]  # comes with vLLM, untyped to mypy
            """Uvicorn server that installs no signal handlers; the run handles signals."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        app = self._app = await _application(engine, arguments, self._name)
        # vLLM's own lifespan would freeze all objects of this process, including the trainer's, in the garbage
        # collector.
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        self._server = Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="vllm-endpoint")
        async with asyncio.timeout(START_S):
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(POLL_S)
        if self._serving.done():
            self._serving.result()
            raise RollError(f"{self._name}: vLLM's server at {self._host} exited at its start")
        self.url = f"http://{self._host}:{self._socket.getsockname()[1]}/v1"

    def serve_adapter(self, request: Any) -> None:
        """Serve the adapter of this `LoRARequest` under its own name."""
        self._app.state.openai_serving_models.lora_requests[request.lora_name] = request

    async def stop(self) -> None:
        """Stop the server and close all connections, including those with running requests. Idempotent."""
        serving, self._serving, self.url = self._serving, None, ""
        if serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await serving
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def _application(engine: AsyncLLM, arguments: AsyncEngineArgs, name: str) -> FastAPI:
    """FastAPI application, built in the same way as by `vllm serve`."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.openai.api_server import init_app_state

    tasks = await engine.get_supported_tasks()
    settings = await asyncio.to_thread(_settings, arguments, name)
    app: FastAPI = build_app(settings, tasks, engine.model_config)
    await init_app_state(engine, app.state, settings, tasks)
    return app


def _settings(arguments: AsyncEngineArgs, name: str) -> Any:
    """Parsed command-line arguments of `vllm serve` that correspond to this engine."""
    import dataclasses

    settings = server_arguments()
    for field in dataclasses.fields(arguments):
        if hasattr(settings, field.name):
            setattr(settings, field.name, getattr(arguments, field.name))
    settings.served_model_name = [name]
    return settings
