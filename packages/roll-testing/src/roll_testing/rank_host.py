"""Process from which ranks are forked: `python -m roll_testing.rank_host FD MODULE...`, see `ranks.py`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_testing.ranks import RankCall, RankResults

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

PEERS_S = 1.0
"""Seconds for the other ranks to return after one has failed; they usually block on it in a collective."""
STACKS_S = 0.5
"""Seconds for a hanging rank to write its stack traces."""
TAIL_CHARS = 4000
"""Characters of a rank's output that an error shows."""

fork = multiprocessing.get_context("fork")


def main() -> None:
    """Serve calls until the client closes the connection."""
    client = Connection(int(sys.argv[1]))
    try:
        for module in sys.argv[2:]:
            importlib.import_module(module)
    except Exception as error:  # any error of a preloaded module is reported to the client
        client.send(f"importing {module} failed: {type(error).__name__}: {error}")
        return
    fill_caches()
    gc.collect()
    gc.freeze()  # ranks would copy the pages that their collections visit
    client.send("")
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            client.send(serve(client.recv(), client))


def fill_caches() -> None:
    """Compile the hundreds of patterns of transformers' checkpoint conversions before processes are forked.

    Each process that loads a model needs them. A version of transformers that keeps them elsewhere is only slower.
    """
    if "transformers.conversion_mapping" not in sys.modules:
        return
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def serve(call: RankCall, client: Connection) -> RankResults:
    """Fork the ranks, collect their results, and kill those that remain. Raises `EOFError` if the client is lost."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Rank(call, rank, Path(folder) / f"rank-{rank}.txt") for rank in range(call.num_ranks)]
        try:
            return collect(ranks, call, client)
        finally:
            for rank in ranks:
                rank.end()


class Rank:
    """One forked rank process, with its connection and output file."""

    def __init__(self, call: RankCall, rank: int, output: Path) -> None:
        self.number, self.output = rank, output
        self.connection, theirs = fork.Pipe()
        self.process: ForkProcess = fork.Process(target=work, args=(call, rank, output, theirs))
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kill the rank's process group, which includes the processes that the rank started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def tail(self) -> str:
        """Return the end of the rank's output."""
        text = self.output.read_text(encoding="utf-8", errors="replace").strip() if self.output.exists() else ""
        return f"\n--- output of rank {self.number} ---\n{text[-TAIL_CHARS:]}" if text else ""


def collect(ranks: list[Rank], call: RankCall, client: Connection) -> RankResults:
    """Return the results of all ranks, or the first failure."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + call.timeout_s
    failures: list[str] = []
    while len(results) + len(failures) < len(ranks):
        open_ones = {rank.connection: rank for rank in ranks if not rank.connection.closed}
        ready = wait([client, *open_ones], max(0.0, deadline - time.monotonic()))
        if client in ready:
            client.recv()  # the client sends nothing during a call, so this is its EOF
            raise EOFError
        if not ready:
            break
        for connection in ready:
            rank = open_ones[connection]  # type: ignore[index]
            failure = take(rank, results)
            if failure:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + PEERS_S)
    if failures:
        return RankResults(failure=failures[0])
    if len(results) < len(ranks):
        return RankResults(failure=silent(ranks, results, call.timeout_s))
    return RankResults(results=tuple(results[rank.number] for rank in ranks))


def take(rank: Rank, results: dict[int, Any]) -> str:
    """Receive one rank's result into `results`. Return the failure, or an empty string."""
    try:
        succeeded, value = rank.connection.recv()
    except EOFError:
        rank.process.join(5)
        code = rank.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        rank.connection.close()
        return f"rank {rank.number} exited ({how}) without a result{rank.tail()}"
    rank.connection.close()
    if not succeeded:
        return f"rank {rank.number} raised\n{value}{rank.tail()}"
    results[rank.number] = value
    return ""


def silent(ranks: list[Rank], results: dict[int, Any], timeout_s: float) -> str:
    """Describe the ranks that timed out, with their stack traces."""
    missing = [rank for rank in ranks if rank.number not in results]
    for rank in missing:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    names = ", ".join(str(rank.number) for rank in missing)
    answered = f"; returned: {', '.join(map(str, sorted(results)))}" if results else ""
    return f"no result of rank {names} within {timeout_s:g} s{answered}" + "".join(rank.tail() for rank in missing)


# -- in the rank process -----------------------------------------------------------------------------------------------


def work(call: RankCall, rank: int, output: Path, connection: Connection) -> None:
    """RankCall the function and send its result. The process then exits without running exit handlers."""
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_the_host, daemon=True).start()
    try:
        answer = True, call.function(rank, *call.arguments)
    except BaseException:  # anything that ends the call is reported, SystemExit included
        answer = False, traceback.format_exc()
    try:
        connection.send(answer)
    except Exception:  # the result cannot be pickled; report it as a failure
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_the_host() -> None:
    host = multiprocessing.parent_process()
    if host is not None:
        host.join()
        os._exit(1)


if __name__ == "__main__":
    main()
