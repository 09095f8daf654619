"""Weight sync that proves itself: a train role's weights reach an infer role, and every receiver shows that it holds
them.

    driver            WeightPublisher.publish(version)
                        |  prepare_send, send_weights           |  receive_weights
    workers           WeightSender beside a train strategy ==> WeightReceiver beside an infer strategy

How bytes travel (`shared`, `shm`, `cuda_ipc`, …) is chosen by `choose_transport` and lives in modules of those names;
`proof` compares what was sent with what is held. Digests are defined in `roll_core.spec.weights`.
"""

from __future__ import annotations

from roll_core.runtime.weights.broadcaster import SyncReport, WeightPublisher
from roll_core.runtime.weights.plan import DeviceFacts, Offer, ReceiveOutcome, SendOutcome, SyncPlan
from roll_core.runtime.weights.receiver import WeightReceiver
from roll_core.runtime.weights.select import PlacementFacts, choose_transport
from roll_core.runtime.weights.sender import WeightSender

__all__ = [
    "DeviceFacts",
    "Offer",
    "PlacementFacts",
    "ReceiveOutcome",
    "SendOutcome",
    "SyncPlan",
    "SyncReport",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSender",
    "choose_transport",
]
