"""megatron-core 0.16 needs the work-arounds for it, and no other version does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

NEEDED = importlib.metadata.version("megatron-core").startswith("0.16.")
LOOK = "from megatron.core.transformer.moe import moe_utils; print(hasattr(moe_utils, 'te_general_gemm'))"


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the kernel is there")
def test_megatron_does_not_name_the_kernel_that_is_missing():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK], capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout.split()[-1] == "False") is NEEDED


WITHOUT = (
    "from megatron.core.transformer import multi_latent_attention as mla; "
    "print(mla.HAVE_TE, isinstance(mla.TELinear, type))"
)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the engine is there")
def test_megatron_takes_an_engine_to_be_there_that_is_not():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout.split()[-2:] == ["True", "False"]) is NEEDED
