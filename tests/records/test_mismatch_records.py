"""Causes that recorded tokens show. Each cause is planted into logprobs of real distributions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from roll_core.errors import RecordingError
from roll_core.runtime.records.mismatch import LogprobBatch, LogprobRow, read_logprobs, write_logprobs

VOCABULARY, PROMPT, RESPONSE = 40, 6, 20
END, IMAGE = 1, 2


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def batch(num_rows=12, seed=0, temperature=1.0, engine=None, **values):
    """Rows sampled from random logits. `engine(logits, row, token)` returns the engine's logits of a token, or None for
    those of the trainer."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(num_rows):
        length = PROMPT + row % 3 * 4
        tokens = list(rng.integers(3, VOCABULARY, length))
        logprobs = [[0.0] * length, [0.0] * length]
        for _ in range(RESPONSE):
            logits = 3 * rng.standard_normal(VOCABULARY)
            trainer = log_softmax(logits / temperature)
            of_engine = trainer if engine is None else log_softmax(engine(logits, tokens))
            token = int(rng.choice(VOCABULARY, p=np.exp(of_engine)))
            logprobs[0].append(of_engine[token])
            logprobs[1].append(trainer[token])
            tokens.append(token)
        rows.append(
            LogprobRow(
                tokens=np.array(tokens),
                sampled=np.arange(len(tokens)) >= length,
                versions=np.where(np.arange(len(tokens)) >= length, 5, -1).astype(np.int32),
                engine=np.array(logprobs[0], np.float32),
                trainer=np.array(logprobs[1], np.float32),
            )
        )
    return LogprobBatch(**{"rows": tuple(rows), "version": 5, "end_tokens": (END,), "image_tokens": (IMAGE,), **values})


def shifted(plain, mask_of, size=0.7):
    """The engine's logprobs of some tokens move by about `size`."""
    rng = np.random.default_rng(1)
    rows = []
    for row in plain.rows:
        mask = mask_of(row) & row.sampled
        moved = row.engine + np.where(mask, size * rng.choice([-1, 1], len(mask)), 0).astype(np.float32)
        rows.append(replace(row, engine=moved))
    return replace(plain, rows=tuple(rows))


def names(diagnosis):
    return [cause.name for cause in diagnosis.causes]


def older_halves(plain, later=4):
    """The first tokens of some rows were sampled by an older version."""
    rows = []
    for index, row in enumerate(plain.rows):
        begin = int(row.sampled.argmax())
        old = (np.arange(len(row.tokens)) < begin + later) & row.sampled & (index % 2 == 0)
        rows.append(replace(row, versions=np.where(old, 3, row.versions).astype(np.int32)))
    return replace(plain, rows=tuple(rows))


def with_token(plain, token):
    """Some rows have this token in the middle of the response."""
    rows = []
    for index, row in enumerate(plain.rows):
        tokens = row.tokens.copy()
        if index % 2:
            tokens[int(row.sampled.argmax()) + 8] = token
        rows.append(replace(row, tokens=tokens))
    return replace(plain, rows=tuple(rows))


def with_image_in_prompt(plain):
    """Every third row's prompt begins with an image."""
    rows = []
    for index, row in enumerate(plain.rows):
        tokens = row.tokens.copy()
        tokens[:3] = [IMAGE] * 3 if index % 3 == 1 else tokens[:3]
        rows.append(replace(row, tokens=tokens))
    return replace(plain, rows=tuple(rows))


def drifting(plain, size=0.1):
    """The gap after an image grows with each token."""
    rows = []
    for row in plain.rows:
        distance = np.cumsum(after(row, IMAGE) & row.sampled)
        moved = row.engine - (size * distance * row.sampled).astype(np.float32)
        rows.append(replace(row, engine=moved))
    return replace(plain, rows=tuple(rows))


def begin(row):
    return int(row.sampled.argmax())


def place(row):
    return np.arange(len(row.tokens))


def penalised(logits, tokens, penalty=1.5):
    seen = np.unique(tokens)
    logits = logits.copy()
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def nucleus(top_p):
    def engine(logits, tokens):
        order = np.argsort(-logits)
        probabilities = np.exp(log_softmax(logits))[order]
        kept = order[: int((np.cumsum(probabilities) < top_p).sum()) + 1]
        masked = np.full_like(logits, -1e9)
        masked[kept] = logits[kept]
        return masked

    return engine


def top_k(k):
    return lambda logits, tokens: np.where(logits >= np.sort(logits)[-k], logits, -1e9)


def late(plain, by):
    """The engine's logprobs belong to the token `by` places earlier."""
    rows = []
    for row in plain.rows:
        start = begin(row)
        rows.append(replace(row, engine=np.append(row.engine[:start], np.roll(row.engine[start:], by))))
    return replace(plain, rows=tuple(rows))


def without(plain):
    """Every fifth logprob of the engine is missing."""
    rows = [replace(row, engine=np.where(place(row) % 5 == 0, 0, row.engine)) for row in plain.rows]
    return replace(plain, rows=tuple(rows))


def from_environment(plain):
    """Some tokens in the mask were not sampled."""
    rows = []
    for row in plain.rows:
        foreign = (place(row) % 7 == 0) & row.sampled
        versions = np.where(foreign, -1, row.versions).astype(np.int32)
        rows.append(replace(row, versions=versions, engine=np.where(foreign, 0, row.engine).astype(np.float32)))
    return replace(plain, rows=tuple(rows))


def after(row, token):
    return np.append(False, np.logical_or.accumulate(row.tokens == token)[:-1])


PLANTED = {
    "stale weights": ("versions.stale", lambda: shifted(older_halves(batch()), lambda row: row.versions == 3)),
    "stale keys": (
        "versions.stale_kv",
        lambda: shifted(
            older_halves(batch()), lambda row: np.logical_or.accumulate(row.versions == 3) & (row.versions == 5)
        ),
    ),
    "environment tokens": ("masks.environment_tokens", lambda: from_environment(batch())),
    "missing logprobs": ("masks.missing_logprobs", lambda: without(batch())),
    "first token": ("tokens.first", lambda: shifted(batch(), lambda row: place(row) == begin(row), 3.0)),
    "after an end": ("tokens.after_end", lambda: shifted(with_token(batch(), END), lambda row: after(row, END))),
    "end token": ("tokens.end", lambda: shifted(with_token(batch(), END), lambda row: row.tokens == END, 4.0)),
    "after an image": (
        "tokens.after_image",
        lambda: shifted(with_token(batch(), IMAGE), lambda row: after(row, IMAGE)),
    ),
    "an image in the prompt": ("tokens.after_image", lambda: drifting(with_image_in_prompt(batch()))),
    "a window": ("tokens.window", lambda: shifted(batch(), lambda row: place(row) >= 18)),
    "a block": ("tokens.block", lambda: shifted(batch(), lambda row: place(row) % 16 == 3)),
    "long prompts": ("inputs.truncation", lambda: shifted(batch(), lambda row: place(row) * 0 + begin(row) >= 14)),
    "raw logprobs": ("sampling.temperature", lambda: batch(temperature=0.7, engine=lambda logits, _: logits)),
    "hotter": ("sampling.temperature", lambda: batch(engine=lambda logits, _: logits / 1.4)),
    "top-p": ("sampling.processed_logprobs", lambda: batch(engine=nucleus(0.8), sampling={"top_p": 0.8})),
    "top-k": ("sampling.processed_logprobs", lambda: batch(engine=top_k(5), sampling={"top_k": 5})),
    "penalty": ("sampling.repetition_penalty", lambda: batch(engine=penalised)),
    "late by one": ("inputs.shift", lambda: late(batch(), 1)),
    "early by one": ("inputs.shift", lambda: late(batch(), -1)),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_cause_is_named_first(case):
    expected, plant = PLANTED[case]
    diagnosis = plant().diagnose()
    assert names(diagnosis)[0] == expected
    assert diagnosis.causes[0].share > 0.5


def test_both_of_two_causes_are_named():
    stale = shifted(older_halves(batch()), lambda row: row.versions == 3)
    both = shifted(stale, lambda row: (place(row) == begin(row)) & (row.versions == 5), 3.0)
    assert set(names(both.diagnose())) == {"versions.stale", "tokens.first"}


def test_stale_tokens_and_stale_keys_are_told_apart():
    """All tokens of a response that began with old weights have the same gap."""
    plain = older_halves(batch(), later=12)
    both = shifted(plain, lambda row: np.full(len(row.tokens), (row.versions == 3).any()))
    assert set(names(both.diagnose())) == {"versions.stale", "versions.stale_kv"}


def test_equal_logprobs_have_no_cause():
    diagnosis = batch().diagnose()
    assert (diagnosis.gap, diagnosis.causes, diagnosis.unexplained) == (0.0, (), 0.0)


def test_rounding_has_no_cause():
    rng = np.random.default_rng(2)
    plain = batch(dtype="bf16")
    rows = [replace(row, engine=row.engine + rng.normal(0, 0.01, len(row.engine))) for row in plain.rows]
    diagnosis = replace(plain, rows=tuple(rows)).diagnose()
    assert 0.004 < diagnosis.gap < diagnosis.noise
    assert not diagnosis.causes


def test_unknown_gap_stays_unexplained():
    """Moves every token by a random distance: no candidate explains it."""
    diagnosis = shifted(batch(), lambda row: row.sampled).diagnose()
    assert diagnosis.unexplained > 0.8


def test_written_logprobs_are_read_back(tmp_path):
    written = replace(without(batch()), step=4, sampling={"top_p": 0.9})
    write_logprobs(tmp_path, written)
    read = read_logprobs(tmp_path)
    assert read.step == 4
    assert read.diagnose() == written.diagnose()


def test_run_without_logprobs_is_an_error(tmp_path):
    with pytest.raises(RecordingError):
        read_logprobs(tmp_path)


def test_damaged_file_is_an_error(tmp_path):
    write_logprobs(tmp_path, batch(step=1))
    file = tmp_path / "logprobs" / "step-1.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([lines[0], json.dumps({"tokens": [1]})]), encoding="utf-8")
    with pytest.raises(RecordingError):
        read_logprobs(tmp_path, 1)
