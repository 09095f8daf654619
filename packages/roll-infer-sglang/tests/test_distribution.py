"""What is kept and what a seed chooses, against numbers worked out by hand and by other means."""

from __future__ import annotations

import torch

from roll_infer_sglang.distribution import filtered, seeded_choice, uniform

PROBS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
ALL = 1 << 30


def cut(top_k=ALL, top_p=1.0, min_p=0.0):
    found = filtered(PROBS, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return [token for token, each in enumerate(found[0].tolist()) if each]


def splitmix(state):
    """SplitMix64's output function, in Python's own integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_nothing_is_cut_where_nothing_is_asked():
    assert cut() == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_token_that_reaches_it():
    assert cut(top_p=0.39) == [1]
    assert cut(top_p=0.5) == [1, 3]
    assert cut(top_p=0.71) == [1, 3, 4]


def test_top_p_is_of_what_top_k_leaves():
    # Of 0.4 and 0.3, the first is 0.57: enough for half, although it is less than half of all.
    assert cut(top_k=2, top_p=0.5) == [1]
    assert cut(top_k=2, top_p=0.6) == [1, 3]


def test_min_p_is_relative_to_the_most_likely():
    assert cut(min_p=0.3) == [1, 3, 4]
    assert cut(top_k=2, min_p=0.3) == [1, 3]


def test_rows_are_cut_each_by_its_own():
    found = filtered(PROBS.repeat(2, 1), torch.tensor([1, ALL]), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.0]))
    assert (found > 0).tolist() == [[False, True, False, False, False], [False, True, False, True, False]]


def test_uniform_numbers_are_splitmixs():
    seeds, positions = torch.tensor([7, 2**62 + 3]), torch.tensor([0, 41])
    gamma = 0x9E3779B97F4A7C15
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        key = splitmix((splitmix(seed) + position * gamma) % 2**64)
        right = [((splitmix((key + column * gamma) % 2**64) >> 12) + 0.5) * 2.0**-52 for column in (1, 2, 3)]
        assert uniform(seeds, positions, 3)[row].tolist() == right


def test_a_choice_depends_on_seed_and_position_alone():
    seeds, positions = torch.arange(50), torch.arange(50) % 7
    together = seeded_choice(PROBS.repeat(50, 1), seeds, positions)
    alone = [seeded_choice(PROBS, seeds[i : i + 1], positions[i : i + 1]).item() for i in range(50)]
    assert together.tolist() == alone
    assert seeded_choice(PROBS.repeat(50, 1), seeds, positions + 1).tolist() != alone


def test_choices_have_the_weights_shares():
    num = 40_000
    drawn = seeded_choice(4 * PROBS.repeat(num, 1), torch.arange(num), torch.full((num,), 3))
    shares = torch.bincount(drawn, minlength=5) / num
    # Five standard deviations of the largest share.
    torch.testing.assert_close(shares, PROBS[0], atol=5 * (0.4 * 0.6 / num) ** 0.5, rtol=0)


def test_tokens_without_weight_are_never_chosen():
    weights = torch.tensor([0.0, 1e-30, 0.0]).repeat(1000, 1)
    assert seeded_choice(weights, torch.arange(1000), torch.zeros(1000, dtype=torch.int64)).unique().tolist() == [1]
