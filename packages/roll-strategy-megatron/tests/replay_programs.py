"""What ranks do with the experts that an engine chose: imported by the ranks."""

from __future__ import annotations

import weakref
from unittest.mock import patch

from roll_strategy_megatron.packing import RoutedExperts
from roll_testing.bench import Case, Split, built, outputs
from shared_tests.replaying import WANT


def take_experts(rank, case: Case, batch):
    """Of each microbatch that is scored: the layers whose experts this rank takes, of how many tokens, and of how many
    other microbatches it still has them."""
    taken, live = [], 0
    take = RoutedExperts.of

    def gone():
        nonlocal live
        live -= 1

    def counted(routed, layers, *part):
        nonlocal live
        found = take(routed, layers, *part)
        taken.append((list(layers), tuple(found.shape), live))
        live += 1
        weakref.finalize(found.untyped_storage(), gone)
        return found

    with patch.object(RoutedExperts, "of", counted), built(case, rank) as strategy:
        outputs(strategy, batch, WANT, Split(max_sequences=1))
    return taken
