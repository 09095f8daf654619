"""Test group *weights*: an update replaces exactly the tensors that it brings, and the receipt proves it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.transfer import WeightReceiver, WeightSender
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.spec.transport import Route
from roll_core.spec.weights import digest, memory_token
from roll_core.types import DataRank
from roll_testing.bounds import check_names
from roll_testing.infer.engine import ROLE
from roll_testing.infer.kit import InferKit
from roll_testing.infer.models import moved
from roll_testing.programs import expect, raised
from roll_testing.publishing import BUCKET_BYTES, DEADLINE_S, IN_ONE_PROCESS, transport_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from roll_core.types import WeightReceipt
    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

    Weights = dict[str, Tensor]

HARMS = {"missing": MissingTensorError, "unexpected": UnexpectedTensorError, "misshapen": CorruptTensorError}


class WeightTests(InferKit):
    """After an update, an engine must compute what the reference computes with the new weights."""

    def test_new_weights_compute_the_outputs(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """After a publish of all tensors, logprobs must be those of the new weights.

        Tokens must have the new version, and the receipt the new digests. The test publishes twice.
        """
        self._can_update()
        for seed in (1, 2):
            weights = self._moved(setup, seed)
            receipt = engine.publish(weights)
            assert receipt.version == engine.version, (
                f"the receipt has version {receipt.version}, expected {engine.version}"
            )
            has_digests(receipt, weights, "the new weights")
            self.check_outputs(engine, setup, oracle, weights)

    def test_each_tensor_takes_effect(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A publish that changes one tensor must change the logprobs as in the reference, for each tensor in turn."""
        self._can_update()
        self.need_exact(setup)
        stored = self.stored(setup)
        for name in stored:
            weights = moved(stored, 3, only=name)
            engine.publish(weights)
            try:
                self.check_outputs(engine, setup, oracle, weights)
            except AssertionError as error:
                raise AssertionError(f"after a change of {name} alone: {error}") from error

    def test_nothing_computed_under_old_weights_is_used(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """An update must invalidate cached prefixes: a long prompt that was just computed must be computed again."""
        self._can_update()
        long = self.prompt(300)
        prompts = [long, long[:270], long]
        self.check_outputs(engine, setup, oracle, prompts=prompts)
        weights = self._moved(setup, 4)
        engine.publish(weights)
        self.check_outputs(engine, setup, oracle, weights, prompts=prompts)

    # -- receipts ------------------------------------------------------------------------------------------------------

    def test_the_receipt_does_not_repeat_the_manifest(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """The receipt must have the digests of the tensors that arrived, even if the manifest has others or none."""
        self._can_update()
        announced, arrived = self._moved(setup, 5), self._moved(setup, 6)
        has_digests(engine.publish(announced, sent=list(arrived.items())), arrived, "what arrived")
        has_digests(engine.publish(arrived, digests=False), arrived, "what arrived")

    def test_the_receipt_has_digests_by_the_manifests_function(
        self, engine: Engine, setup: Setup, oracle: Oracle
    ) -> None:
        """If the manifest names `multilinear`, as between devices, the receipt must have these digests.

        The sender then has no others, and a receipt with XXH3's could not be compared.
        """
        self._can_update()
        for seed, digests in ((16, True), (17, False)):
            weights = self._moved(setup, seed)
            receipt = engine.publish(weights, digests=digests, like=MULTILINEAR)
            has_digests(receipt, weights, "what arrived", like=MULTILINEAR)

    def test_the_receipt_describes_the_loaded_weights(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """The receipt must describe the loaded weights, not the sent ones.

        Tensors in another dtype must either raise a `WeightSyncError`, or be converted to the engine's dtype before
        digesting.
        """
        self._can_update()
        weights = self._moved(setup, 7)
        other = torch.bfloat16 if setup.model.dtype != "bf16" else torch.float32
        sent = {name: tensor.to(other) for name, tensor in weights.items()}
        try:
            receipt = engine.publish(sent)
        except WeightSyncError:
            return
        held = {name: tensor.to(weights[name].dtype) for name, tensor in sent.items()}
        has_digests(receipt, held, "what is held")
        self.check_outputs(engine, setup, oracle, held)

    # -- tensors that are not sent ----------------------------------------------------------------------------------

    def test_tensors_that_are_not_sent_keep_their_values(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """With `keeps_weights`, an update must leave the tensors of a layer that it does not contain as they are.

        The receipt must have the digests of all tensors.
        """
        self.need(self.can.keeps_weights, "keeps_weights")
        engine.publish(first := self._moved(setup, 18))
        for seed in (19, 20):
            weights = self._moved(setup, seed) | _first_layer(first)
            receipt = engine.publish(weights, unsent=_first_layer(first))
            has_digests(receipt, weights, "what was sent and kept")
            self.check_outputs(engine, setup, oracle, weights)

    @pytest.mark.parametrize("after", ["a failed update", "a sleep"])
    def test_tensors_that_may_be_lost_must_be_sent(
        self, engine: Engine, setup: Setup, oracle: Oracle, after: str
    ) -> None:
        """With `keeps_weights`, an update without a tensor that may be lost must raise a `MissingTensorError`.

        Tensors may be lost in a failed update and in a sleep. The next update of all tensors must work.
        """
        self.need(self.can.keeps_weights, "keeps_weights")
        weights = self._moved(setup, 21)
        engine.publish(weights)
        if after == "a sleep":
            self.need(self.can.sleeps, "sleeps")
            engine.run(engine.strategy.sleep)
            engine.run(engine.strategy.wake)
        else:
            raised(lambda: engine.publish(weights, sent=list(weights.items())[:1]))
        error = raised(lambda: engine.publish(weights, unsent=_first_layer(weights)))
        expect(error, MissingTensorError, f"a tensor that is not sent after {after}", next(iter(_first_layer(weights))))
        engine.publish(weights)
        self.check_outputs(engine, setup, oracle, weights)

    # -- faulty publishes ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("harm", list(HARMS))
    def test_what_does_not_fit_the_manifest_is_named(
        self, engine: Engine, setup: Setup, oracle: Oracle, harm: str
    ) -> None:
        """A missing, unknown or misshapen tensor must raise a `WeightSyncError` of its own class that names the tensor.

        The next good publish must work.
        """
        self._can_update()
        weights = self._moved(setup, 8)
        name = list(weights)[len(weights) // 2]
        sent = list(weights.items())
        if harm == "missing":
            sent = [(other, tensor) for other, tensor in sent if other != name]
        elif harm == "unexpected":
            name = "surprise.weight"
            sent.append((name, torch.ones(3, dtype=sent[0][1].dtype)))
        else:
            sent = [(other, tensor if other != name else torch.ones(7, dtype=tensor.dtype)) for other, tensor in sent]
        error = raised(lambda: engine.publish(weights, sent=sent))
        expect(error, HARMS[harm], f"a tensor that is {harm}", name)
        engine.publish(weights)
        self.check_outputs(engine, setup, oracle, weights)

    # -- memory ownership ----------------------------------------------------------------------------------------------

    def test_the_engine_copies_what_it_receives(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """An engine must copy each tensor before it requests the next. The sender reuses and overwrites its buffer."""
        self._can_update()
        weights = self._moved(setup, 9)
        receipt = engine.publish(weights, sent=_Reused(weights))
        has_digests(receipt, weights, "what was sent")
        self.check_outputs(engine, setup, oracle, weights)

    def test_shared_tensors_may_be_a_trainers_own(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A trainer's in-place step must be visible after the next publish of its shared tensors.

        A later publish of other tensors must not write into the trainer's memory.
        """
        self.need("shared" in self.can.weight_transports, "the transport shared")
        live = self._moved(setup, 10)
        has_digests(engine.publish(live, shared=True), live, "the shared tensors")
        self.check_outputs(engine, setup, oracle, live)
        for name, tensor in moved(live, 11).items():
            live[name].copy_(tensor)
        has_digests(engine.publish(live, shared=True), live, "the shared tensors after a step")
        self.check_outputs(engine, setup, oracle, live)
        copies = {name: tensor.clone() for name, tensor in live.items()}
        other = self._moved(setup, 12)
        engine.publish(other)
        self.check_outputs(engine, setup, oracle, other)
        if changed := [name for name, tensor in live.items() if not torch.equal(tensor, copies[name])]:
            raise AssertionError(f"an update changed the trainer's {changed[0]}")

    def test_weights_arrive_by_every_transport(
        self, engine: Engine, setup: Setup, oracle: Oracle, transport: str, tmp_path: Path
    ) -> None:
        """Weights must arrive by every declared transport, in many buckets.

        The runtime's sender and receiver run in one process. The test publishes twice.
        """
        if transport not in IN_ONE_PROCESS:
            pytest.skip(f"the ends of {transport} cannot be in one process")
        exporter = _Exporter(self._moved(setup, 13))
        sender = WeightSender(exporter, role="actor_train", rank=0)  # type: ignore[arg-type]
        receiver = WeightReceiver(engine.strategy, role=ROLE, rank=0)
        try:
            for seed in (14, 15):
                exporter.weights = self._moved(setup, seed)
                receipt = self._publish(engine, sender, receiver, transport, tmp_path)
                has_digests(receipt, exporter.weights, "what was exported")
                self.check_outputs(engine, setup, oracle, exporter.weights)
        finally:
            sender.close()
            receiver.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _can_update(self) -> None:
        self.need(bool(self.can.weight_transports), "a weight transport")

    def _moved(self, setup: Setup, seed: int) -> Weights:
        """Return the stored weights, each of them changed."""
        return self.published(moved(self.stored(setup), seed), setup.model)

    def _publish(
        self, engine: Engine, sender: WeightSender, receiver: WeightReceiver, transport: str, directory: Path
    ) -> WeightReceipt:
        """Publish as a run does."""
        engine.version += 1
        engine.pristine = False
        plan = SyncPlan(
            version=engine.version,
            transport=transport_record(transport),
            route=Route(options={"directory": str(directory)}),
            num_receivers=1,
            bucket_bytes=BUCKET_BYTES,
            deadline_s=DEADLINE_S,
        )
        handle = sender.prepare(plan)
        assert handle is not None, "the only rank does not send"

        async def act() -> WeightReceipt:
            receiving = asyncio.create_task(receiver.receive(plan, handle))
            sent = None if plan.transport.in_process else await asyncio.to_thread(sender.send, plan)
            received = await receiving
            for failure in (received.failure, sent.failure if sent else None):
                if failure is not None:
                    raise failure
            assert received.receipt is not None, "the receiver has no receipt"
            return received.receipt

        return engine.run(act)


def _first_layer(weights: Weights) -> Weights:
    """The tensors of the first layer, which engines may fuse with each other."""
    return {name: tensor for name, tensor in weights.items() if ".0." in name}


class _Reused:
    """Tensors as a transport yields them: in a buffer that the next one overwrites."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        largest = max(tensor.numel() for tensor in self._weights.values())
        buffers = {tensor.dtype: torch.empty(largest, dtype=tensor.dtype) for tensor in self._weights.values()}
        for name, tensor in self._weights.items():
            buffer = buffers[tensor.dtype]
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(7)


class _Exporter:
    """The part of a train strategy that a `WeightSender` needs."""

    data_rank = DataRank()

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, as train strategies do."""
        yield from self.weights.items()

    def export_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: the model has no such buffers."""
        return iter(())

    def frozen_weights(self) -> Collection[str]:
        """Return nothing: all weights change."""
        return ()


def has_digests(receipt: WeightReceipt, weights: Mapping[str, Tensor], what: str, like: str | None = None) -> None:
    """Fail unless the receipt has the digests of exactly these tensors, by the function of `like` (default: any)."""
    check_names(receipt.digests, weights)
    wrong = []
    for name, tensor in weights.items():
        reported = receipt.digests[name]
        # For shared tensors, manifest and receipt have a token of the memory instead of a digest.
        if reported not in (digest(tensor, reported if like is None else like), memory_token(tensor)):
            wrong.append(name)
    assert not wrong, (
        f"the receipt's digests of {len(wrong)} tensors are not those of {what}, for example of {wrong[0]}"
    )
