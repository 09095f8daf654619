import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import ContractError, DataError
from roll_pipeline_diffusion.advantages import flow_advantages, group
from roll_pipeline_diffusion.algorithm_config import BoundFunction
from roll_pipeline_diffusion.windows import all_steps, checked_window, progressive, random, stop_step


def test_the_window_of_all_steps_leaves_out_the_last():
    assert list(all_steps(3, 5, 0)) == [0, 1, 2, 3]


def test_random_windows_are_adjacent_steps_and_reach_every_place():
    found = {tuple(random(update, 10, 7, size=2, step_range=[1, 5])) for update in range(200)}

    assert found == {(1, 2), (2, 3), (3, 4)}


def test_a_random_window_depends_on_seed_and_update_only():
    assert [tuple(random(at, 10, 1)) for at in range(20)] == [tuple(random(at, 10, 1)) for at in range(20)]
    assert [tuple(random(at, 10, 1)) for at in range(20)] != [tuple(random(at, 10, 2)) for at in range(20)]


def test_a_progressive_window_moves_toward_data_and_starts_again():
    found = [list(progressive(at, 6, 0, size=2, iters_per_group=2)) for at in range(10)]

    assert found == [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3], [3, 4], [3, 4], [0, 1], [0, 1]]


def test_progressive_window_ends_at_its_range_for_every_stride():
    found = [list(progressive(at, 10, 0, size=2, stride=2, iters_per_group=1, step_range=[1, 6])) for at in range(4)]

    assert found == [[1, 2], [3, 4], [4, 5], [1, 2]]


@given(num_steps=st.integers(3, 40), size=st.integers(1, 5), update=st.integers(0, 500), seed=st.integers(0, 2**32))
def test_no_built_in_window_includes_the_last_step(num_steps, size, update, seed):
    size = min(size, num_steps - 1)
    for steps in (
        all_steps(update, num_steps, seed),
        random(update, num_steps, seed, size=size),
        progressive(update, num_steps, seed, size=size, stride=2, iters_per_group=3),
    ):
        assert checked_window(steps, num_steps, "w")[-1] <= num_steps - 2


@pytest.mark.parametrize("steps", [[], [0, 4], [1, 1], [2, 1], [-1, 0], 3, ["a"]])
def test_a_window_with_other_steps_is_refused(steps):
    with pytest.raises(ContractError, match="my:window"):
        checked_window(steps, 5, "my:window")


def test_the_stop_of_refl_is_the_last_step_or_uniform():
    found = np.bincount([stop_step(update, 8, 3, [4, 7]) for update in range(600)], minlength=8)

    assert stop_step(0, 8, 3, None) == 7
    assert (found[:4].sum(), found[7]) == (0, 0)
    assert found[4:7].min() > 150


REWARDS = torch.tensor([1.0, 3.0, 10.0, 20.0])
GROUPS = torch.tensor([5, 5, 2, 2])


def test_advantages_by_hand():
    """Group means 2 and 15. Deviations: of all 8.5829 (mean 8.5), of the groups 1.4142 and 7.0711."""
    apart = torch.tensor([-1.0, 1.0, -5.0, 5.0])
    whole = REWARDS.double().std()

    def found(**options):
        return group({"r": REWARDS}, GROUPS, {"r": 1.0}, epsilon=0.0, adv_clip_max=None, **options)

    torch.testing.assert_close(found(), (apart / whole).float())
    torch.testing.assert_close(found(std="none"), apart)
    torch.testing.assert_close(found(std="group"), torch.tensor([-1.0, 1.0, -1.0, 1.0]) / 2**0.5)


def test_advantages_are_clamped():
    found = group({"r": REWARDS}, GROUPS, {"r": 1.0}, std="none", adv_clip_max=2.0)

    assert found.tolist() == [-1, 1, -2, 2]


def test_rewards_are_summed_with_weights_or_normalised_before():
    scores = {"a": REWARDS, "b": torch.tensor([200.0, 100.0, 0.0, 0.0])}
    weights = {"a": 2.0, "b": 0.5}

    total = group(scores, GROUPS, weights, std="none", adv_clip_max=None)
    separate = group(scores, GROUPS, weights, normalise="separate", std="group", epsilon=0.0, adv_clip_max=None)

    assert total.tolist() == [-2 + 25, 2 - 25, -10, 10]
    torch.testing.assert_close(separate, torch.tensor([-1.5, 1.5, -2.0, 2.0]) / 2**0.5)


def test_equal_rewards_have_no_advantage():
    assert group({"r": torch.ones(4)}, GROUPS, {"r": 1.0}).tolist() == [0, 0, 0, 0]


GROUP = BoundFunction(target="roll_pipeline_diffusion.advantages:group", options={})


def test_failed_samples_have_no_vote():
    without = flow_advantages(GROUP, {"r": REWARDS}, GROUPS, {"r": 1.0})[0]
    scores = {"r": torch.cat([REWARDS, torch.tensor([float("nan"), 1000.0])])}
    scores["other"] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, float("nan")])

    found, counts = flow_advantages(GROUP, scores, torch.cat([GROUPS, torch.tensor([5, 2])]), {"r": 1.0, "other": 3.0})

    assert counts.tolist() == [True, True, True, True, False, False]
    torch.testing.assert_close(found, torch.cat([without, torch.zeros(2)]))


def test_a_batch_of_failed_samples_has_no_advantages():
    found, counts = flow_advantages(GROUP, {"r": torch.full((2,), float("nan"))}, torch.tensor([0, 0]), {"r": 1.0})

    assert (found.tolist(), counts.any().item()) == ([0, 0], False)


@pytest.mark.parametrize(
    ("scores", "weights"),
    [({"r": torch.tensor([1.0, float("inf")])}, {"r": 1.0}), ({"r": torch.ones(2)}, {"s": 1.0}), ({}, {})],
)
def test_scores_that_cannot_be_used_are_refused(scores, weights):
    with pytest.raises(DataError):
        flow_advantages(GROUP, scores, torch.tensor([0, 0]), weights)


def test_an_advantage_of_the_user_is_checked(tmp_path, monkeypatch):
    (tmp_path / "flow_adv_a.py").write_text("def first(scores, groups_S, weights): return scores['r'][:1]\n")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ContractError, match="flow_adv_a:first"):
        flow_advantages(BoundFunction(target="flow_adv_a:first", options={}), {"r": REWARDS}, GROUPS, {"r": 1.0})
