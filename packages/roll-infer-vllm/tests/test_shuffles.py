"""Layouts are learned from what a shuffle does to indices, without vLLM."""

import pytest
import torch

from roll_infer_vllm.shuffles import learned

SHAPES = [(6, 8), (8, 3)]


def permutation(numel, seed):
    return torch.randperm(numel, generator=torch.Generator().manual_seed(seed))


def permuted(pair):
    return [each.flatten(1)[:, permutation(each[0].numel(), seed)] for seed, each in enumerate(pair)]


def halves_swapped_and_padded(pair):
    first, second = pair
    gate, up = first.chunk(2, dim=1)
    return [
        torch.nn.functional.pad(torch.cat([up, gate], dim=1), (0, 5)),
        torch.nn.functional.pad(second, (2, 0, 1, 0)),
    ]


def tiled(pair):
    first, second = pair
    return [first.view(2, 3, 2, 2, 4).permute(0, 1, 3, 2, 4).contiguous(), second.transpose(1, 2).contiguous()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shuffle", [list, permuted, halves_swapped_and_padded, tiled])
def test_shuffled_matrices_are_read_back(shuffle, dtype):
    weights = [torch.randn(2, *shape).to(dtype) for shape in SHAPES]
    found = learned((shuffle, "own"), shuffle, SHAPES, weights[0])
    for weight, shuffled, places in zip(weights, shuffle(weights), found, strict=True):
        assert torch.equal(shuffled.flatten(1)[:, places].view(weight.shape), weight)


def test_indices_of_several_digits_are_told_apart():
    shape = (130, 129)  # more than two digits of 7 bits
    weight = torch.randn(2, *shape).bfloat16()

    def shuffle(matrices):
        return [matrices[0].flatten(1)[:, permutation(130 * 129, 3)]]

    (places,) = learned("several digits", shuffle, [shape], weight)
    assert torch.equal(shuffle([weight])[0][:, places].view(weight.shape), weight)


def one_lost(pair):
    return [torch.cat([pair[0].flatten(1)[:, 1:], pair[0].flatten(1)[:, 1:2]], dim=1), pair[1]]


def dropped(pair):
    return [pair[0][:, :-1].contiguous(), pair[1]]


def scaled(pair):
    return [pair[0] * 2, pair[1]]


def matrices_exchanged(pair):
    return [pair[0].flip(0), pair[1]]


@pytest.mark.parametrize("shuffle", [one_lost, dropped, scaled, matrices_exchanged])
def test_other_layouts_are_not_accepted(shuffle):
    found = learned((shuffle, "own"), shuffle, SHAPES, torch.zeros(()))
    assert found[0] is None
    assert found[1] is not None
