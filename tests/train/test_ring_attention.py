"""Attention over a ring of ranks equals attention over all tokens, forwards and backwards. Ranks are threads here: that
processes compute the same is in the tests of the strategies that use it."""

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from roll_core.errors import UnsupportedError
from roll_modeling import ring_attention
from roll_modeling.attention import AttentionOptions, FlatLayout, attend_flat
from roll_modeling.ring_attention import blocks, chunks
from roll_testing.errors import raises_error

HEADS, KEY_HEADS, SIZE = 4, 2, 8


class ThreadRing:
    """Of which each thread is a rank."""

    def __init__(self, rank, mailboxes):
        self.rank, self.size, self.mailboxes = rank, len(mailboxes), mailboxes

    def pass_on(self, tensor):
        self.mailboxes[(self.rank + 1) % self.size].put(tensor.clone())
        return SimpleNamespace(wait=lambda: self.mailboxes[self.rank].get(timeout=30))


def filled_up(lengths, ranks):
    more = -sum(lengths) % (2 * ranks)
    return (*lengths, more) if more else tuple(lengths)


def own_tokens(rank, ranks, num_tokens):
    length = num_tokens // (2 * ranks)
    return torch.cat([torch.arange(start, start + length) for start, _ in chunks(rank, ranks, length)])


def with_gradients(attend, tensors, weights):
    tensors = [each.detach().requires_grad_() for each in tensors]
    found = attend(*tensors)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), tensors)]


def around(ranks, tensors, weights, how):
    """Outputs and gradients of each rank's tokens, by rank."""
    mailboxes = [queue.Queue() for _ in range(ranks)]
    answers = [None] * ranks

    def work(rank):
        mine = own_tokens(rank, ranks, sum(how.lengths))
        ring = ThreadRing(rank, mailboxes)

        def attend(query, key, value, sinks=None):
            return ring_attention._Ring.apply(query[0], key[0], value[0], sinks, how, ring)[None]

        inputs = [*(each[:, :, mine] for each in tensors[:3]), *tensors[3:]]
        answers[rank] = with_gradients(attend, inputs, weights[:, mine])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return answers


@pytest.mark.parametrize("window", [0, 4], ids=["", "window"])
@pytest.mark.parametrize("scores", ["", "softcap", "sinks"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[17], [5, 1, 9, 3, 12, 2, 7], [1], [2, 30]], ids=str)
def test_a_ring_computes_what_one_rank_computes(monkeypatch, lengths, ranks, window, scores):
    monkeypatch.setattr(ring_attention, "MAX_SCORES", 200)  # so that blocks are cut
    layout = FlatLayout(filled_up(lengths, ranks))
    how = AttentionOptions(layout=layout, scale=SIZE**-0.5, window=window, softcap=3.0 if scores == "softcap" else 0.0)
    drawn = torch.Generator().manual_seed(len(lengths))
    num_tokens = sum(how.lengths)
    tensors = [torch.randn(1, heads, num_tokens, SIZE, generator=drawn) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors += [torch.randn(HEADS, generator=drawn)] if scores == "sinks" else []
    weights = torch.randn(1, num_tokens, HEADS, SIZE, generator=drawn)

    def attend(query, key, value, sinks=None):
        return attend_flat(query, key, value, replace(how, sinks_H=sinks))

    out, *gradients = with_gradients(attend, tensors, weights)
    by_rank = around(ranks, tensors, weights, how)
    for rank, (found, *found_gradients) in enumerate(by_rank):
        mine = own_tokens(rank, ranks, num_tokens)
        torch.testing.assert_close(found, out[:, mine], rtol=0, atol=1e-5)
        for one, other in zip(found_gradients[:3], gradients, strict=False):
            torch.testing.assert_close(one, other[:, :, mine], rtol=0, atol=1e-5)
    if scores == "sinks":
        torch.testing.assert_close(sum(each[-1] for each in by_rank), gradients[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_blocks_cover_every_visible_query_key_pair_once(window):
    lengths, ranks = (3, 8, 1, 4), 2
    starts = torch.tensor([0, 3, 11, 12, 16])
    segment = torch.bucketize(torch.arange(16), starts, right=True)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    sees = (segment[:, None] == segment) & (distance >= 0) & ((distance < window) if window else True)
    found = torch.zeros(16, 16, dtype=torch.int64)
    for rank in range(ranks):
        for other in range(ranks):
            queries, keys = own_tokens(rank, ranks, 16), own_tokens(other, ranks, 16)
            for block in blocks(rank, other, ranks, lengths, window):
                rows, columns = queries[block.queries], keys[block.keys]
                hidden = block.hidden(window, torch.device("cpu"))
                seen = torch.ones(len(rows), len(columns), dtype=torch.bool) if hidden is None else ~hidden
                assert seen.any(dim=1).all()
                found[rows[:, None], columns] += seen
    assert torch.equal(found, sees.long())


def test_a_long_sequence_is_as_much_work_for_each_rank():
    def work(rank):
        every = (block for other in range(4) for block in blocks(rank, other, 4, (4096,), 0))
        return sum((each.queries.stop - each.queries.start) * (each.keys.stop - each.keys.start) for each in every)

    assert len({work(rank) for rank in range(4)}) == 1


def test_values_smaller_than_keys_are_refused():
    query, value = torch.zeros(1, HEADS, 4, SIZE), torch.zeros(1, KEY_HEADS, 4, SIZE - 2)
    how = AttentionOptions(layout=FlatLayout((8,)), scale=1.0, window=0, softcap=0.0)
    with raises_error(UnsupportedError, "values"):
        ring_attention.Ring.attend(ThreadRing(0, []), query, query[:, :KEY_HEADS], value, how)
