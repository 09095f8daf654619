"""The kit against every engine of roll-wrong, the right one among them."""

from __future__ import annotations

from typing import ClassVar

import torch
from roll_wrong.plugin import ADAPTERS, WRONG_ENGINES
from safetensors.torch import load_file, save_file

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_testing import InferStrategyConformance, ReferenceModel


class BigramReference(ReferenceModel):
    """Rows of the table."""

    def __init__(self, path, dtype):
        stored = load_file(f"{path}/weights.safetensors")
        self.module = torch.nn.Module()
        self.module.table = torch.nn.Embedding.from_pretrained(rounded(stored["table.weight"], dtype))
        self.module.bias = torch.nn.Parameter(rounded(stored["bias"], dtype))

    def logits(self, tokens_L):
        return self.module.table(tokens_L) + self.module.bias


def rounded(tensor, dtype):
    return tensor if dtype == "fp32" else tensor.bfloat16().float()


class Suite(InferStrategyConformance):
    """What all of them need said."""

    train_strategy = ""
    tight_config: ClassVar = {"cache_tokens": 1024}
    written: ClassVar[dict[str, ModelSpec]] = {}

    def model(self, folder):
        if not self.written:  # one for all of them
            drawn = torch.Generator().manual_seed(5)
            size = self.vocab_size
            table, bias = torch.randn(size, size, generator=drawn), torch.randn(size, generator=drawn)
            save_file({"table.weight": 1.5 * table, "bias": 0.3 * bias}, folder / "weights.safetensors")
            alphabet = "".join(chr(ord("0") + i) for i in range(size - 2))
            make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet), (), folder)
            self.written["it"] = ModelSpec(path=str(folder))
        return self.written["it"]

    def reference_model(self, spec):
        return BigramReference(spec.path, spec.dtype)

    def processes(self, strategy):
        return [strategy.process.pid]


for name in ("right_engine", *WRONG_ENGINES, *ADAPTERS):
    title = f"Test_{name}"
    globals()[title] = type(title, (Suite,), {"name": name, "__module__": __name__})
