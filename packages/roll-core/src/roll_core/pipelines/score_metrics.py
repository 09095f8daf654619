"""Metrics of scored responses with confidence intervals, for validations of training runs and for evaluations.

    samples ─► ScoredResponse ─► prompt values by metric ─┬─► score_metrics: mean over prompts, interval
                                                          └─► paired_differences of two models, interval

Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from roll_core.pipelines.best_of_k import best_of_k, majority_of_k
from roll_core.runtime.records.scores import ScoredResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from roll_core.types import Sample

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0
CI_LOW, CI_HIGH = "ci_low", "ci_high"
"""Last part of the names of an interval's bounds."""
_RESAMPLES_AT_ONCE = 50

PromptValues: TypeAlias = "dict[str, dict[str, tuple[float, float]]]"
"""By metric and prompt: a sum and its count. The metric is the sum over prompts of the one, over that of the other."""


def validation_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """`score_metrics` of the samples of an evaluation."""
    return score_metrics([ScoredResponse.of(sample) for sample in samples])


def score_metrics(responses: Sequence[ScoredResponse]) -> dict[str, float]:
    """Metrics `val/…` of all responses, and `val/<tag>/…` if there are several tags.

    * `score/mean`: mean reward of the responses.
    * `pass@k`, `best@k`, `maj@k`: see `prompt_values`.
    * `response_length/mean` in sampled tokens, `response_length/cut_share`: share that reached the maximum length.
    * `num_samples`, `reward_failures`: numbers of responses, and of failed rewards, which count nowhere else.

    With two prompts or more, each score has a 95% confidence interval, `<metric>/ci_low` and `/ci_high`, without the
    `/mean`: percentiles of 1,000 bootstrap resamples of the prompts, from a fixed seed.
    """
    metrics = {"num_samples": float(len(responses))}
    tags = sorted({response.tag for response in responses})
    scopes = {"": responses}
    if len(tags) > 1:
        scopes |= {f"{tag or 'untagged'}/": [r for r in responses if r.tag == tag] for tag in tags}
    for scope, members in scopes.items():
        metrics |= {
            f"{scope}reward_failures": float(sum(response.score is None for response in members)),
            f"{scope}response_length/mean": statistics.fmean(r.num_tokens for r in members) if members else 0.0,
            f"{scope}response_length/cut_share": statistics.fmean(r.cut for r in members) if members else 0.0,
        }
        values = prompt_values(members)
        metrics |= {f"{scope}{name}": _mean(by_prompt.values()) for name, by_prompt in values.items()}
        for name, (low, high) in _intervals(values).items():
            base = name.removesuffix("/mean")
            metrics |= {f"{scope}{base}/{CI_LOW}": low, f"{scope}{base}/{CI_HIGH}": high}
    return {f"val/{name}": value for name, value in metrics.items()}


def prompt_values(responses: Sequence[ScoredResponse]) -> PromptValues:
    """Values of each prompt: of `score/mean`, and with several responses of `pass@k`, `best@k` and `maj@k`.

    k is 2, 4, 8, … and the number of responses to a prompt, for `pass@k` also 1. Each is the expected value over all
    subsets of k of the prompt's responses, which is unbiased (arXiv:2107.03374):

    * `pass@k`: the probability that one of them is correct, which means a reward of at least 1.
    * `best@k`: the highest reward.
    * `maj@k`: the reward of the most frequent answer; of several, each wins with equal probability. Only if rewards
      have a text `answer` in their detail, as `math_rule` has. No answer counts as one. Answers are compared as texts.

    Failed rewards do not count; a prompt with fewer than k rewards is left out of the metrics of k.
    """
    groups: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for response in responses:
        if response.score is not None:
            groups[response.prompt].append((response.answer, response.score))
    values: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    most = max(map(len, groups.values()), default=0)
    ks = sorted({1, most, *(2**power for power in range(1, most.bit_length()))}) if most > 1 else []
    answered = {k: any(a for group in groups.values() if len(group) >= k for a, _ in group) for k in ks}
    for prompt, group in groups.items():
        scores = sorted(score for _, score in group)
        values["score/mean"][prompt] = (math.fsum(scores), len(scores))
        for k in ks:
            if len(group) < k:
                continue
            values[f"pass@{k}"][prompt] = (best_of_k([float(score >= 1) for score in scores], k), 1)
            if k == 1:
                continue
            values[f"best@{k}"][prompt] = (best_of_k(scores, k), 1)
            if answered[k]:
                values[f"maj@{k}"][prompt] = (majority_of_k(group, k), 1)
    return dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Difference of a metric of two models on the same prompts: the second model's less the first's."""

    metric: str
    num_prompts: int
    difference: float
    low: float
    """Lower bound of the 95% confidence interval."""
    high: float


def paired_differences(first: Sequence[ScoredResponse], second: Sequence[ScoredResponse]) -> list[PairedDifference]:
    """Differences of the metrics of `prompt_values` over the prompts that both models have; none for fewer than two.

    Intervals are percentiles of bootstrap resamples of the prompts. Both models have the same resample, so that the
    difficulty of prompts cancels out.
    """
    ours, theirs = prompt_values(first), prompt_values(second)
    differences = []
    for metric in ours.keys() & theirs.keys():
        prompts = sorted(ours[metric].keys() & theirs[metric].keys())
        if len(prompts) < 2:
            continue
        pairs_P4 = np.array([(*ours[metric][prompt], *theirs[metric][prompt]) for prompt in prompts])
        sums_R4 = np.concatenate([pairs_P4.sum(0)[None], _resampled_sums(pairs_P4)])
        differences_R = sums_R4[:, 2] / sums_R4[:, 3] - sums_R4[:, 0] / sums_R4[:, 1]
        low, high = _percentiles(differences_R[1:])
        differences.append(
            PairedDifference(
                metric=metric, num_prompts=len(prompts), difference=float(differences_R[0]), low=low, high=high
            )
        )
    order = list(ours)
    return sorted(differences, key=lambda difference: order.index(difference.metric))


def _mean(values: Iterable[tuple[float, float]]) -> float:
    sums, counts = zip(*values, strict=True)
    return math.fsum(sums) / math.fsum(counts)


def _intervals(values: PromptValues) -> dict[str, tuple[float, float]]:
    """95% confidence interval of each metric. Prompts are resampled together; none for fewer than two prompts."""
    prompts = sorted({prompt for by_prompt in values.values() for prompt in by_prompt})
    if len(prompts) < 2:
        return {}
    missing = (0.0, 0.0)
    columns = [[by_prompt.get(prompt, missing) for prompt in prompts] for by_prompt in values.values()]
    sums_RM2 = _resampled_sums(np.array(columns).transpose(1, 0, 2))
    with np.errstate(invalid="ignore"):  # a resample without any prompt of the metric
        means_RM = sums_RM2[..., 0] / sums_RM2[..., 1]
    return {name: _percentiles(means_RM[:, index]) for index, name in enumerate(values)}


def _resampled_sums(values_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums over the prompts of each bootstrap resample, `[R, …]` of values `[P, …]`."""
    rng, num_prompts = np.random.default_rng(BOOTSTRAP_SEED), len(values_P)
    sums = []
    for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        chosen_RP = rng.integers(num_prompts, size=(_RESAMPLES_AT_ONCE, num_prompts))
        counts_RP = np.stack([np.bincount(chosen_P, minlength=num_prompts) for chosen_P in chosen_RP])
        sums.append(np.tensordot(counts_RP, values_P, 1))
    return np.concatenate(sums)


def _percentiles(values_R: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanquantile(values_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
