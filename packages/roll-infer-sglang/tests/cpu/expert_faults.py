"""Faults of a loader of experts: what a weight update does with the fault that a file names.

Such faults were found in engines or in code around them. The digests that are read back must show each.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from standin import change

FILE = "SGLANG_TEST_FAULT"
"""Environment variable with the path of the file."""


def install():
    """In this process, from now on, if tests ask for faults."""
    if FILE in os.environ:
        change("sglang.srt.layers.moe.fused_moe_triton.layer", _break)


def _break(module):
    load = module.FusedMoE.weight_loader

    def weight_loader(self, param, tensor, name, shard_id, expert_id):
        fault = Path(os.environ[FILE]).read_text(encoding="utf-8")
        if fault == "dropped" and expert_id == 3:
            return
        if fault == "stale rank" and self.moe_ep_rank + self.moe_tp_rank:
            return
        if fault == "swapped" and expert_id in (3, 4):
            expert_id = 7 - expert_id
        if fault == "halves swapped":
            shard_id = {"w1": "w3", "w3": "w1"}.get(shard_id, shard_id)
        if fault == "map shifted":
            expert_id = (expert_id + 1) % self.num_experts
        if fault == "bit" and expert_id == 5 and shard_id == "w2":
            tensor = tensor.clone()
            tensor.view(torch.int32)[1, 2] ^= 1
        load(self, param, tensor, name, shard_id=shard_id, expert_id=expert_id)

    module.FusedMoE.weight_loader = weight_loader
