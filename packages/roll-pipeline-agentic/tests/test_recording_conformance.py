"""The endpoint passes the kit, and each wrong recorder fails exactly its test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from roll_core.types import Rollout
from roll_pipeline_agentic.config import AgentEndpointConfig
from roll_pipeline_agentic.recording import Limits, Recorder
from roll_pipeline_agentic.recording_server import RecordingServer
from shared_tests.recording_conformance import RecordingConformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Recorded:
    base_url: str
    api_key: str
    recorder: Recorder
    session: Any

    async def finish(self) -> tuple[Rollout, str]:
        rollout = await self.recorder.finish()
        if self.session is not None:
            self.session.__exit__(None, None, None)
            self.session = None
        return rollout, self.recorder.problem


class TestEndpoint(RecordingConformance):
    recorder: type[Recorder] = Recorder
    server: type[RecordingServer] = RecordingServer

    @asynccontextmanager
    async def rollout(self, context: Any, encoder: Any, *, calls: int, tokens: int) -> AsyncIterator[Recorded]:
        recorder = self.recorder(context, encoder, Limits(calls=calls, reply_tokens=64, tokens=tokens), key="0/0")
        server = self.server()
        await server.start()
        session = server.session(recorder)
        recorded = Recorded(server.base_url, session.__enter__(), recorder, session)
        try:
            yield recorded
        finally:
            await recorded.finish()
            await server.close()


def test_endpoint_is_local_unless_the_config_has_a_host() -> None:
    async def main() -> set[str]:
        server = RecordingServer(AgentEndpointConfig().host)
        await server.start()
        try:
            port = urlsplit(server.base_url).port
            sockets = psutil.Process().net_connections("tcp")
            return {each.laddr.ip for each in sockets if each.status == "LISTEN" and each.laddr.port == port}
        finally:
            await server.close()

    assert asyncio.run(main()) == {"127.0.0.1"}


# -- wrong recorders ---------------------------------------------------------------------------------------------------


class EncodesAgain(Recorder):
    async def _prompt(self, request: Any) -> Any:
        _, budget, begin, _ = await super()._prompt(request)
        return self._encoder.encode(request.messages), budget, begin, None


class DropsATurn(Recorder):
    async def finish(self) -> Rollout:
        rollout = await super().finish()
        chain = len(rollout.turns) == 3 and [turn.parent for turn in rollout.turns] == [None, 0, 1]
        return Rollout(turns=rollout.turns[:-1]) if chain else rollout


class TrainsABranchTwice(Recorder):
    async def finish(self) -> Rollout:
        rollout = await super().finish()
        if [turn.parent for turn in rollout.turns] != [None, 0, 0]:
            return rollout
        first, *branches = rollout.turns
        again = replace(branches[1], parent=2)
        return Rollout(turns=(first, branches[0], first, again))


class LinksNothing(Recorder):
    def _parent(self, ids: Any, continued: Any) -> None:
        return None


class InventsLogprobs(Recorder):
    async def finish(self) -> Rollout:
        rollout = await super().finish()
        return Rollout(turns=tuple(replace(turn, logprobs=np.zeros_like(turn.logprobs)) for turn in rollout.turns))


class SamplesRetriesAgain(Recorder):
    def begin(self, request: Any, *, digest: str, key: str = "", retried: bool = False) -> Any:
        return super().begin(request, digest=digest, key=key, retried=False)


class NeverSamplesTwice(Recorder):
    def begin(self, request: Any, *, digest: str, key: str = "", retried: bool = False) -> Any:
        return super().begin(request, digest=digest, key=key, retried=True)


class TrainsOnWhatNobodyReceived(Recorder):
    async def finish(self) -> Rollout:
        if not all(call.delivered for call in self._calls):
            await asyncio.sleep(0.05)
        for call in self._calls:
            call.delivered = call.delivered or (call.task.done() and not call.begun)
        return await super().finish()


class IgnoresForeignReplies(Recorder):
    def _check_replies(self, messages: Any, *, first: bool) -> None:
        pass


class IgnoresMissingTokens(Recorder):
    def incomplete(self, problem: str) -> None:
        if "tokens" not in problem:
            super().incomplete(problem)


class HasNoLimits(Recorder):
    def __init__(self, context: Any, encoder: Any, limits: Limits, **given: Any) -> None:
        super().__init__(context, encoder, Limits(calls=99, reply_tokens=64, tokens=9999), **given)


class OneSampleOnly(Recorder):
    async def finish(self) -> Rollout:
        rollout = await super().finish()
        roots = [turn for turn in rollout.turns if turn.parent is None]
        same = {tuple(turn.context_ids.tolist()) for turn in roots}
        return Rollout(turns=(roots[0],)) if len(roots) == 3 and len(same) == 1 else rollout


class KeepsSecrets(RecordingServer):
    def session(self, recorder: Recorder) -> Any:
        context = super().session(recorder)
        self._recorders = _Unforgetting(self._recorders)
        return context


class _Unforgetting(dict[str, Any]):
    def __delitem__(self, key: str) -> None:
        pass


SHARED: list[Recorder] = []


class MixesRollouts(RecordingServer):
    """The last rollout gets all calls."""

    def session(self, recorder: Recorder) -> Any:
        SHARED.append(recorder)
        return super().session(recorder)

    def _recorder(self, request: Any) -> Recorder:
        super()._recorder(request)
        return SHARED[-1]


class CutsStreams(RecordingServer):
    def _answer(self, dialect: Any, request: Any) -> Any:
        class Cut(type(dialect)):  # type: ignore[misc]
            def stream(self, id: str, body: Any) -> Any:
                found = super().stream(id, body)
                delta = found._delta
                found._delta = lambda index, kind, text: delta(index, kind, text.replace("r", ""))
                return found

        return super()._answer(Cut(), request)


class ShowsNothingEarly(Recorder):
    """A stream begins when its reply is complete."""

    def _progress(self, *arguments: Any) -> None:
        pass


class ForgetsBrokenStreams(Recorder):
    def incomplete(self, problem: str) -> None:
        if "closed" not in problem:
            super().incomplete(problem)


class SamplesBrokenStreamsAgain(Recorder):
    def _repeated(self, digest: str, *, retried: bool) -> Any:
        found = super()._repeated(digest, retried=retried)
        return None if found is not None and found.begun and not found.delivered else found


class SamplesLostRepliesAgain(Recorder):
    def _repeated(self, digest: str, *, retried: bool) -> Any:
        found = super()._repeated(digest, retried=retried)
        return None if found is not None and not found.begun and not found.delivered else found


WRONG = {
    EncodesAgain: "a_prompt_begins_with_the_recorded_tokens",
    DropsATurn: "every_turn_is_recorded",
    InventsLogprobs: "logprobs_are_those_of_the_engine",
    LinksNothing: "turns_are_linked_by_their_tokens",
    TrainsABranchTwice: "a_branch_is_trained_once",
    OneSampleOnly: "several_samples_of_a_request_are_siblings",
    CutsStreams: "a_stream_has_the_same_content",
    ShowsNothingEarly: "a_stream_shows_tokens_while_they_are_sampled",
    SamplesBrokenStreamsAgain: "a_stream_that_broke_is_sent_whole_to_a_repeated_request",
    ForgetsBrokenStreams: "a_stream_that_broke_is_incomplete",
    SamplesRetriesAgain: "a_repeated_request_is_sampled_once",
    NeverSamplesTwice: "an_equal_request_is_sampled_again",
    KeepsSecrets: "a_secret_ends_with_its_rollout",
    MixesRollouts: "rollouts_do_not_mix",
    IgnoresForeignReplies: "a_call_that_went_around_is_incomplete",
    IgnoresMissingTokens: "a_response_without_tokens_is_incomplete",
    TrainsOnWhatNobodyReceived: "undelivered_reply_is_not_a_turn",
    SamplesLostRepliesAgain: "disconnected_client_gets_the_reply_on_retry",
    HasNoLimits: "limits_refuse_calls",
}
TESTS = [name for name in vars(RecordingConformance) if name.startswith("test_")]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_recorder_fails_exactly_its_test(wrong: Any) -> None:
    part = "server" if issubclass(wrong, RecordingServer) else "recorder"
    kit = type("Wrong", (TestEndpoint,), {part: wrong, "first_bytes_s": 0.5})()
    failed = set()
    for name in TESTS:
        try:
            getattr(kit, name)()
        except pytest.skip.Exception:
            pass
        except Exception:
            failed.add(name.removeprefix("test_"))
    assert failed == {WRONG[wrong]}


def test_every_test_of_the_kit_has_a_wrong_recorder() -> None:
    assert {f"test_{name}" for name in WRONG.values()} == set(TESTS)
