"""Token in, token out: sampled tokens are trained on, even where decoding and encoding again would change them."""

import json

import numpy as np
import pytest

from roll_core.data.pack import sequence_of
from roll_core.data.tokenizers import make_tokenizer
from roll_core.runtime.rollout.program import group_of
from roll_core.runtime.rollout.scoring import request_of
from roll_core.runtime.run.active_run import token_problem
from roll_core.runtime.workers.strategy import model_vocab_size
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.rollout import Prompt
from roll_core.types import Completion, CompletionOutput


def test_trained_ids_are_the_sampled_ids_not_the_retokenised(tmp_path):
    texts = ["the cat sat on the mat, the end"] * 50
    tokenizer = make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), texts, tmp_path)
    # A model may draw "the" letter by letter, though the tokenizer would write it as one token.
    drawn = [i for letter in "the" for i in tokenizer.encode(letter)]
    assert tokenizer.encode(tokenizer.decode(drawn)) != drawn

    prompt = Prompt(id="0/0", tokens=np.array(tokenizer.encode("on ")), text="on ")
    output = CompletionOutput(
        token_ids=np.array(drawn),
        logprobs=np.full(len(drawn), -1.0, dtype=np.float32),
        versions=np.zeros(len(drawn), dtype=np.int32),
        finish_reason="length",
    )
    sample = group_of(prompt, Completion(id="0/0", outputs=(output,))).samples[0]
    sequence = sequence_of(sample, group=0)

    assert sequence.tokens.tolist() == prompt.tokens.tolist() + drawn
    assert sequence.loss_mask.tolist() == [False] * len(prompt.tokens) + [True] * len(drawn)
    assert request_of(sample, prompt, tokenizer).response == "the"  # the judge reads text; nothing comes back
    assert token_problem(sample, vocab_size=len(tokenizer), version=0) == ""


def test_tokens_that_cannot_have_been_sampled_are_named():
    def problem(**given):
        arrays = {
            "token_ids": np.array([1, 2]),
            "logprobs": np.array([-0.5, -0.5], dtype=np.float32),
            "versions": np.array([3, 3], dtype=np.int32),
        } | given
        output = CompletionOutput(finish_reason="stop", **arrays)
        prompt = Prompt(id="0", tokens=np.array([1]), text="")
        sample = group_of(prompt, Completion(id="0", outputs=(output,))).samples[0]
        return token_problem(sample, vocab_size=5, version=3)

    assert problem() == ""
    assert "token ids from 1 to 5" in problem(token_ids=np.array([1, 5]))
    assert "logprobs" in problem(logprobs=np.array([-0.5, np.nan], dtype=np.float32))
    assert "logprobs" in problem(logprobs=np.array([-0.5, 0.5], dtype=np.float32))
    assert "versions [2, 3]" in problem(versions=np.array([2, 3], dtype=np.int32))
    assert "1 logprobs" in problem(logprobs=np.array([-0.5], dtype=np.float32))


@pytest.mark.parametrize("padded", [151_936, None])
def test_vocabulary_is_that_of_the_model_embedding_if_readable(tmp_path, padded):
    keys = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    if padded:
        (tmp_path / "config.json").write_text(json.dumps(keys | {"vocab_size": padded}), encoding="utf-8")
    assert model_vocab_size(ModelSpec(path=str(tmp_path))) == padded
