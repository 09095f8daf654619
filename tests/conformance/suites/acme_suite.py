"""What roll-acme's authors would write: the name, and what their model is."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll_core.spec.model import ModelSpec
from roll_testing import InferStrategyConformance, ReferenceModel, TrainStrategyConformance


class Table(torch.nn.Module):
    """Logits of the next token by the last one, all 0."""

    def __init__(self, vocabulary):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(vocabulary, vocabulary))


class TableReference(ReferenceModel):
    """The same table, looked up in the plainest way."""

    def __init__(self, vocabulary):
        self.module = Table(vocabulary)

    def logits(self, tokens_L):
        return torch.stack([self.module.table[token] for token in tokens_L.tolist()])


class TestAcme(TrainStrategyConformance):
    name = "acme_train"
    preload = (*TrainStrategyConformance.preload, "roll_acme.bigram")

    @pytest.fixture
    def strategy_config(self):
        return {"vocabulary": self.vocab_size}

    def model(self, task, folder):
        return ModelSpec(task=task, random_init={"model_type": "bigram"})

    def reference_model(self, spec):
        return TableReference(self.vocab_size)


class TestAcmeInfer(InferStrategyConformance):
    name = "acme_infer"
    context = None
    end_ids = ()
    train_strategy = ""  # theirs makes a table of its own

    @pytest.fixture
    def strategy_config(self):
        return {"vocabulary": self.vocab_size}

    def model(self, folder):
        drawn = torch.Generator().manual_seed(5)
        table = 1.5 * torch.randn(self.vocab_size, self.vocab_size, generator=drawn)
        save_file({"table": table}, folder / "table.safetensors")
        return ModelSpec(path=str(folder))

    def reference_model(self, spec):
        found = TableReference(self.vocab_size)
        found.module.load_state_dict(load_file(f"{spec.path}/table.safetensors"))
        return found
