"""One kernel call computes all sequences of a layer, with the same result, by a stand-in: kernels are CUDA's."""

from __future__ import annotations

import pytest
from megatron_programs import DEEPSEEK
from test_arrangements import MISTRAL, Arrangement, check_against_transformers, sizes
from varlen import with_kernel

from roll_testing.models import QWEN3
from roll_testing.ranks import free_port


@pytest.fixture
def run(host):
    def on_ranks(function, case, *arguments):
        ready = case.with_(master_port=free_port())
        return host.run(with_kernel, function, ready, *arguments, num_ranks=case.world_size, timeout_s=200)

    return on_ranks


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(Arrangement(ranks=1, model=MISTRAL), id="window"),
        pytest.param(Arrangement(ranks=2, model=MISTRAL, config=sizes(cp=2)), id="window, cp 2"),
        pytest.param(Arrangement(ranks=2, model=QWEN3, config=sizes(cp=2)), id="cp 2", marks=pytest.mark.slow),
        pytest.param(Arrangement(ranks=1, model=DEEPSEEK), id="values smaller than keys", marks=pytest.mark.slow),
    ],
)
def test_single_call_computes_all_sequences(run, tmp_path, arrangement):
    check_against_transformers(run, tmp_path, arrangement)
