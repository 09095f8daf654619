"""The transport `shared`: engines in the trainer's process use the exported tensors themselves; no bytes move.

It has no endpoints: `WeightSender.prepare` hands the tensors over, and `WeightReceiver` passes them to the engine. The
proof compares memory addresses instead of digests (`roll_core.spec.weights.memory_token`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.transport import BufferSizes, WeightTransport

if TYPE_CHECKING:
    from roll_core.spec.transport import RoleFacts, WeightSizes


class SharedTransport(WeightTransport):
    """Shares tensors within one process (`in_process` in its provider record)."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return None

    @override
    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        return BufferSizes(sender_bytes=0, receiver_bytes=0)
