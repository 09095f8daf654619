"""An executor of a third party: each worker in a process of its own, on this host."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from pathlib import Path

from roll_core.errors import WorkerDiedError
from roll_core.runtime.cluster.executors import wire, worker_main
from roll_core.runtime.cluster.executors.base import Executor, Member, Peers, WorkerGroup, collect, retrieve
from roll_core.runtime.cluster.executors.worker_server import WIRE, decode
from roll_core.runtime.cluster.platform import values_of
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import ExecutorProvider
from shared_tests.forked import Forked

ROLL_HOOK_API = 1


@hookimpl
def roll_executors():
    yield ExecutorProvider(name="sockets", target=f"{__name__}:SocketExecutor", summary="Processes", priority=99)


class SocketExecutor(Executor):
    def __init__(self, platform, slots_per_node):
        super().__init__(platform, slots_per_node)
        self.workers = []
        self.exited = asyncio.Event()

    async def start(self, specs):
        try:
            return {spec.role: await self._start_group(spec) for spec in specs}
        except BaseException:
            await self.close()
            raise

    async def _start_group(self, spec):
        workers = [Worker(spec, place, self) for place in spec.places]
        self.workers += workers
        members = [await worker.connect() for worker in workers]
        path = [str(Path(entry or ".").absolute()) for entry in sys.path]
        building = {
            member: worker.built((spec.target, place, Peers(), dict(spec.args), {}, path))
            for worker, member, place in zip(workers, members, spec.places, strict=True)
        }
        await collect(spec.role, "start", building, spec.timeout_s)
        return SocketGroup(spec, members, workers)

    def devices(self, place):
        """The variable that restricts a worker to its devices."""
        return {self.platform.visible_devices: ",".join(map(str, place.local_indices))}

    async def watch(self):
        await self.exited.wait()
        raise next(worker.error for worker in self.workers if worker.error)

    async def close(self):
        workers, self.workers = self.workers, []
        for worker in workers:
            await worker.close()


class SocketGroup(WorkerGroup):
    def __init__(self, spec, members, workers):
        super().__init__(spec, members)
        self.workers = workers

    def begin(self, rank, method, arguments):
        return self.workers[rank].call(method, arguments)


class Worker:
    def __init__(self, spec, place, executor):
        self.spec, self.place, self.executor = spec, place, executor
        self.frames, self.calls, self.pending = itertools.count(1), itertools.count(), {}
        self.error = self.reading = None
        self.ours, theirs = socket.socketpair()
        settings = {"role": spec.role, "rank": place.rank, "level": logging.INFO, "crash_file": "", "reported": []}
        env = values_of(executor.platform.environment(spec.kind, place.local_indices)) | dict(spec.env)
        env |= executor.devices(place) if executor.platform.visible_devices else {}
        with theirs:
            words = [worker_main.__name__, str(theirs.fileno()), json.dumps(settings)]
            self.process = Forked(words, output=Path(os.devnull), env=os.environ | env, pass_fds=(theirs.fileno(),))

    async def connect(self):
        reader, self.writer = await asyncio.open_connection(sock=self.ours)
        _, facts = await worker_main.read_frame(reader)
        self.reading = asyncio.ensure_future(self.read(reader))
        return Member(
            rank=self.place.rank,
            host=json.loads(facts)["host"],
            pid=self.process.pid,
            node=self.place.node,
            slots=self.place.slots,
        )

    async def read(self, reader):
        try:
            while True:
                number, body = await worker_main.read_frame(reader)
                reply = self.pending.pop(number)
                reply.cancelled() or reply.set_result(wire.loads(body))
        except EOFError:
            self.error = WorkerDiedError(self.spec.role, self.place.rank, "here", "", "its socket closed")
            self.executor.exited.set()
            for future in self.pending.values():
                future.cancelled() or future.set_exception(self.error)

    async def close(self):
        if self.reading and not self.error:
            with contextlib.suppress(Exception):  # it may exit meanwhile
                await asyncio.wait_for(self.request_frame("close", 5.0), 60)
        self.process.kill()
        self.process.wait()
        if self.reading:
            await self.reading
            self.writer.close()

    def request_frame(self, method, *args):
        number = next(self.frames)
        self.pending[number] = asyncio.get_running_loop().create_future()
        self.writer.write(worker_main.frame(number, wire.dumps([method, list(args)])))
        return self.pending[number]

    def request(self, method, *args):
        return asyncio.ensure_future(self.reply(self.request_frame(method, *args), args[0]))

    async def reply(self, reply, number):
        try:
            return decode(WIRE, await reply)
        except asyncio.CancelledError:
            if not self.error:
                self.request_frame("cancel", number).add_done_callback(retrieve)
            raise

    def built(self, payload):
        return self.request("construct", WIRE.dumps(payload))

    def call(self, method, arguments):
        return self.request("call", next(self.calls), method, WIRE.dumps(arguments))
