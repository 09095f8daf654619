"""The expert layout that engines' rows of all layers are reduced by."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from roll_core.errors import UnsupportedError
from roll_modeling.routing import RoutingLayout
from roll_testing.errors import raises_error


def config(**keys):
    return SimpleNamespace(**{"model_type": "mixture", "num_hidden_layers": 4, "num_experts_per_tok": 2} | keys)


@pytest.mark.parametrize(
    ("keys", "layers", "dtype"),
    [
        ({"n_routed_experts": 300, "first_k_dense_replace": 1}, (1, 2, 3), np.uint16),
        ({"num_experts": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2}, (1, 3), np.uint8),
        ({"num_local_experts": 8}, (0, 1, 2, 3), np.uint8),
    ],
)
def test_layers_without_experts_are_left_out(keys, layers, dtype):
    every = np.arange(3 * 4 * 2, dtype=np.int32).reshape(3, 4, 2)
    found = RoutingLayout.of(config(**keys)).routed_experts(every)
    assert np.array_equal(found, every[:, list(layers)])
    assert found.dtype == dtype


def test_a_model_without_experts_has_no_layout():
    with raises_error(UnsupportedError, "dense"):
        RoutingLayout.of(config(model_type="dense"))
