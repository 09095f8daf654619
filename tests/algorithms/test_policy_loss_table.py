"""Every policy loss: by hand, against a loop over tokens in float64, and however the batch is split."""

import math
import random
import zlib

import pytest
import torch
from pydantic import ValidationError

from roll_core.algorithms import policy_losses
from roll_core.builtin.plugin import roll_policy_losses
from roll_core.errors import DataError
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.algorithms import PolicyLossParams
from roll_core.spec.config import Config
from roll_testing.errors import raises_error

RECORDS = {record.name: record for record in roll_policy_losses()}
TARGETS = {record.target.partition(":")[2]: record for record in RECORDS.values()}
LN2, E = math.log(2), math.e


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# -- by hand -----------------------------------------------------------------------------------------------------------

HAND = [
    # (loss, rows of (old logprob, log-ratio, advantage), options, losses, gradients of their sum)
    # s = exp((2 ln 2 + 0) / 2) = 2, clipped at 1.5 for A = 1.
    ("gspo", [[(-1, 2 * LN2, 1), (-1, 0, 1)]], {"clip_high": 0.5}, [-1.5, -1.5], [0, 0]),
    ("gspo", [[(-1, 2 * LN2, -1), (-1, 0, -3)]], {}, [2, 6], [4, 4]),
    ("gspo_token", [[(-1, 2 * LN2, -1), (-1, 0, -3)]], {}, [2, 6], [2, 6]),
    ("luspo", [[(-1, 2 * LN2, -1), (-1, 0, -1)]], {}, [4, 4], [4, 4]),
    # c = (ln 2, 0), geometric mean sqrt 2; A < 0 has no upper clip: (2 ln 2, 0) gives 2.
    ("gmpo", [[(-1, 2 * LN2, 1), (-1, 0, 1)]], {"clip_high": LN2}, [-(2**0.5)] * 2, [0, -(2**0.5)]),
    ("gmpo", [[(-1, 2 * LN2, -1), (-1, 0, -1)]], {"clip_high": LN2, "clip_low": LN2}, [2, 2], [2, 2]),
    ("gmpo", [[(-1, -2 * LN2, -1), (-1, 0, -1)]], {"clip_low": LN2}, [0.5**0.5] * 2, [0, 0.5**0.5]),
    # Weights 8 -> 5, 1, 1/2 by default; 1.1, 1, 0.9 relative.
    ("cispo", [[(-1, 3 * LN2, 1), (-1, 0, 1), (-1, -LN2, -1)]], {}, [5 - 15 * LN2, 1, -(1 + LN2) / 2], [-5, -1, 0.5]),
    (
        "cispo",
        [[(-1, 3 * LN2, 1), (-1, 0, 1), (-1, -LN2, -1)]],
        {"bounds": "relative", "clip_low": 0.1, "clip_high": 0.1},
        [1.1 * (1 - 3 * LN2), 1, -0.9 * (1 + LN2)],
        [-1.1, -1, 0.9],
    ),
    # (4 / tau) sigmoid(tau (r - 1)): on-policy the gradient is -A.
    (
        "sapo",
        [[(-1, 0, 3), (-1, LN2, 1), (-1, LN2, -1)]],
        {},
        [-6, -4 * sigmoid(1), 4 / 1.05 * sigmoid(1.05)],
        [-3, -8 * sigmoid(1) * sigmoid(-1), 8 * sigmoid(1.05) * sigmoid(-1.05)],
    ),
    ("topr", [[(-1, LN2, -1), (-1, -2 * LN2, -1)]], {}, [(LN2 - 1) / 2, (-1 - 2 * LN2) / 2], [0.5, 0.5]),
    ("topr", [[(-1, LN2, -1), (-1, -2 * LN2, -1)]], {"level": "token"}, [LN2 - 1, (-1 - 2 * LN2) / 4], [1, 0.25]),
    ("topr", [[(-1, LN2, 3), (-1, -2 * LN2, 3)]], {"positive_weight": 2.0}, [6 - 6 * LN2, 6 + 12 * LN2], [-6, -6]),
    ("raft_plus_plus", [[(-1, LN2, 1), (-1, LN2, -1), (-1, -LN2, 2)]], {}, [-1.2, 0, -1], [0, 0, -1]),
    ("dro", [[(-1, LN2, 2)]], {"beta": 0.5}, [2 - 2 * LN2 + LN2**2 / 4], [-2 + LN2 / 2]),
    # w = 2: phi = e^3 2^2 e^-6 = 4 e^-3 for A >= 0, e^2 2^3 e^-4 = 8 e^-2 for A < 0.
    ("vespo", [[(-1, LN2, 1), (-1, 0, 1)]], {}, [4 / E**3 * (1 - LN2), 4 / E**3], [-4 / E**3] * 2),
    ("vespo", [[(-1, LN2, -1), (-1, 0, -1)]], {}, [8 / E**2 * (LN2 - 1), -8 / E**2], [8 / E**2] * 2),
    # Mean logprob -2, covariances -2 (-3 + 2) = 2 and -2 (-1 + 2) = -2.
    ("clip_cov", [[(-3, 0, -2), (-1, 0, -2)]], {"probability": 1.0}, [0, 2], [0, 2]),
    ("clip_cov", [[(-3, 0, -2), (-1, 0, -2)]], {"probability": 0.0}, [2, 2], [2, 2]),
    ("clip_cov", [[(-3, 0, -2), (-1, 0, -2)]], {"probability": 1.0, "cov_high": 1.5}, [2, 2], [2, 2]),
    ("kl_cov", [[(-3, LN2, -2), (-1, LN2, -2)]], {"cov_threshold": 1.0, "kl_coef": 3.0}, [4 + 3 * LN2, 4], [7, 4]),
    ("vanilla", [[(-1, LN2, 2)]], {}, [2 - 2 * LN2], [-2]),
]


@pytest.mark.parametrize(("name", "rows", "given", "losses", "gradients"), HAND)
def test_losses_by_hand(micro_of, name, rows, given, losses, gradients):
    micro = micro_of(
        [[1] * len(row) for row in rows],
        old_logprobs=[[old for old, _, _ in row] for row in rows],
        advantages=[[advantage for _, _, advantage in row] for row in rows],
    )
    logprobs = torch.tensor([old + float(ratio) for row in rows for old, ratio, _ in row]).requires_grad_()
    found, _ = getattr(policy_losses, name)(logprobs, micro, PolicyLossParams(options=given))
    found.sum().backward()
    assert found.tolist() == pytest.approx(losses, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx(gradients, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("engine", "policy", "advantage", "given", "gradient"),
    [
        (0.5, 0.9, 1, {}, 0),  # |p - q| = 0.4 > 0.2, in the direction of A
        (0.5, 0.9, -1, {}, 1.8),  # against it: p / q
        (0.9, 0.5, -1, {}, 0),
        (0.9, 0.5, 1, {}, -5 / 9),
        (0.5, 0.6, 1, {}, -1.2),
        (0.5, 0.6, 1, {"delta_high": 0.05}, 0),
        (0.01, 0.2, 1, {"ratio_high": 3.0}, -3),
        (0.5, 0.9, 1, {"divergence": "kl"}, 0),  # ln(5/9) / 2 + ln(5) / 2 = 0.511
        (0.5, 0.6, 1, {"divergence": "kl"}, -1.2),  # ln(5/6) / 2 + ln(5/4) / 2 = 0.0204
        (0.5, 0.6, 1, {"divergence": "kl", "delta_high": 0.02}, 0),
        (0.5, 0.6, 1, {"divergence": "kl", "delta_high": 0.021}, -1.2),
        # ln(5/9) / 2 + ln(0.6 / 0.2) / 2 = 0.255
        (0.5, 0.9, 1, {"divergence": "kl", "delta_high": 0.26, "probability_epsilon": 0.1}, -1.8),
    ],
)
def test_dppo_masks_by_divergence(micro_of, engine, policy, advantage, given, gradient):
    micro = micro_of([[1]], behaviour_logprobs=[[math.log(engine)]], advantages=[[advantage]])
    logprobs = torch.tensor([math.log(policy)]).requires_grad_()
    found, metrics = policy_losses.dppo(logprobs, micro, PolicyLossParams(options=given))
    found.sum().backward()
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert metrics["clipfrac"].item() == (gradient == 0)


def test_dppo_needs_the_engines_logprobs(micro_of):
    with raises_error(DataError, "dppo"):
        policy_losses.dppo(torch.zeros(1), micro_of([[1]], advantages=[[1]]), PolicyLossParams())


# -- against a loop ----------------------------------------------------------------------------------------------------


def clamp(x, low, high):
    return x if low <= x <= high else torch.tensor(low if x < low else high, dtype=torch.float64)


def clip_by(ratio, a, low, high):
    plain, clipped = ratio * a, clamp(ratio, 1 - low, 1 + high) * a
    return -(plain if plain <= clipped else clipped)


def uniform(sample_id, position):
    x = (zlib.crc32(sample_id.encode()) + position * 0x9E3779B1) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return (x ^ (x >> 16)) / 2**32


def loop(name, row, o, params):
    """Losses of a row's tokens in the loss: (logprob, old, engine's, advantage, sample id, position) each, float64."""
    n, sg = len(row), torch.Tensor.detach
    logs = [clamp(x - old, -20, 20) for x, old, *_ in row]
    mean, total = sum(logs) / n, clamp(sum(logs), -20, 20).item()
    center = sum(x.item() for x, *_ in row) / n
    low, high = params.pg_clip_low, params.pg_clip_high
    found = []
    for t, (x, _, engine, a, sample_id, position) in enumerate(row):
        r, cov = logs[t].exp(), a * (x.item() - center)
        if name == "ppo":
            loss = clip_by(r, a, low, high)
        elif name == "vanilla":
            loss = -a * x
        elif name in ("gspo", "luspo"):
            loss = clip_by(mean.exp(), a, o.clip_low, o.clip_high) * (n if name == "luspo" else 1)
        elif name == "gspo_token":
            loss = clip_by(sg(mean).exp() * (x - sg(x)).exp(), a, o.clip_low, o.clip_high)
        elif name == "gmpo":
            kept = [
                max(y, -o.clip_low) if each[3] < 0 else min(y, o.clip_high) for y, each in zip(logs, row, strict=True)
            ]
            loss = -a * torch.as_tensor(sum(kept) / n).exp()
        elif name == "cispo":
            loss = -sg(clamp(r, *o.interval)) * a * x
        elif name == "sapo":
            tau = o.tau_pos if a > 0 else o.tau_neg
            loss = -4 / tau / (1 + (-tau * (r - 1)).exp()) * a
        elif name == "dppo":
            p, q = math.exp(x.item()), math.exp(engine)
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            far = (abs(p - q) if o.divergence == "tv" else kl) > (o.delta_high if a > 0 else o.delta_low)
            loss = -a * x * (0 if far and (p > q) == (a > 0) else min(p / q, o.ratio_high))
        elif name == "topr":
            w = math.exp(total if o.level == "sequence" else logs[t].item())
            loss = -a * x * (o.positive_weight if a > 0 else o.negative_weight * min(max(w, o.clip_low), o.clip_high))
        elif name == "raft_plus_plus":
            loss = clip_by(r, max(a, 0.0), low, high)
        elif name == "dro":
            loss = -a * x + o.beta / 2 * (x - row[t][1]) ** 2
        elif name == "vespo":
            k, rate = (o.k_pos, o.lambda_pos) if a >= 0 else (o.k_neg, o.lambda_neg)
            w = math.exp(total)
            loss = -math.exp(rate) * w**k * math.exp(-rate * w) * a * x
        elif name == "clip_cov":
            clipped = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
            chosen = o.cov_low < cov < o.cov_high and not clipped and uniform(sample_id, position) < o.probability
            loss = 0 * x if chosen else clip_by(r, a, low, high)
        elif name == "kl_cov":
            loss = -r * a + (o.kl_coef * logs[t].abs() if cov > o.cov_threshold else 0)
        found.append(loss)
    return found


SETTINGS = {
    "gspo": [{}, {"clip_low": 0.1, "clip_high": 0.2}],
    "gspo_token": [{}, {"clip_low": 0.1, "clip_high": 0.2}],
    "luspo": [{"clip_low": 0.1, "clip_high": 0.2}],
    "cispo": [{}, {"bounds": "relative", "clip_low": 0.2, "clip_high": 0.3}],
    "dppo": [{}, {"divergence": "kl", "delta_low": 0.1}],
    "topr": [{}, {"level": "token", "negative_weight": 0.5}],
    "clip_cov": [{"cov_low": 0.1, "cov_high": 2.0, "probability": 0.5}],
    "kl_cov": [{"cov_threshold": 0.2}],
}


class Batch:
    """Ragged rows; outside of the mask everything is NaN."""

    def __init__(self, seed, *, old=True):
        rng = random.Random(seed)
        self.masks = [[0, *(int(rng.random() < 0.7) for _ in range(rng.randrange(1, 9)))] for _ in range(5)]
        self.masks[rng.randrange(5)] = [0, 0]  # a row without a token in the loss
        self.ids = [f"{seed}-{at}" for at in range(5)]
        sign = [rng.choice([-1, 1]) for _ in range(5)]

        def values(draw):
            return [[draw(s) if m else math.nan for m in mask] for s, mask in enumerate(self.masks)]

        self.logprobs = values(lambda s: rng.uniform(-3, -0.01))
        near = {s: rng.choice([0.02, 0.5, 2.0]) for s in range(5)}
        self.fields = {
            "behaviour_logprobs": values(lambda s: rng.uniform(-3, -0.01)),
            "advantages": values(lambda s: sign[s] * rng.uniform(0.1, 3)),
        }
        if old:
            self.fields["old_logprobs"] = [
                [x + rng.gauss(0, near[s]) for x in row] for s, row in enumerate(self.logprobs)
            ]

    def micro(self, micro_of, rows=range(5), totals=None):
        fields = {name: [values[s] for s in rows] for name, values in self.fields.items()}
        ids = [self.ids[s] for s in rows]
        micro = micro_of([self.masks[s] for s in rows], totals=totals, ids=ids, **fields)
        flat = torch.tensor([x for s in rows for x in self.logprobs[s]]).requires_grad_()
        return flat, micro


def cases():
    return [(name, given) for name in TARGETS for given in SETTINGS.get(name, [{}])]


@pytest.mark.parametrize("old", [True, False], ids=["", "without old logprobs"])
@pytest.mark.parametrize(("name", "given"), cases())
def test_a_loss_equals_a_loop_over_tokens(micro_of, name, given, old):
    """Values and gradients, on ragged rows whose values outside of the mask are NaN."""
    function = getattr(policy_losses, name)
    parsed = schema_of(TARGETS[name], Config, owner=name)(**given)
    params = PolicyLossParams(pg_clip_low=0.2, pg_clip_high=0.3, options=given)
    for seed in range(6):
        batch = Batch(seed, old=old)
        flat, micro = batch.micro(micro_of)
        found, metrics = function(flat, micro, params)
        weights = torch.arange(1.0, len(flat) + 1)
        (found * weights)[micro.loss_mask_T].sum().backward()
        expected, gradients = [], []
        for s, mask in enumerate(batch.masks):
            xs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in batch.logprobs[s]]
            taken = [t for t, m in enumerate(mask) if m]
            olds = batch.fields["old_logprobs"][s] if old else batch.logprobs[s]
            columns = batch.fields["behaviour_logprobs"][s], batch.fields["advantages"][s]
            row = [(xs[t], olds[t], columns[0][t], columns[1][t], batch.ids[s], t) for t in taken]
            losses = loop(name, row, parsed, params) if row else []
            begin = sum(map(len, batch.masks[:s])) + 1
            if losses:
                sum(loss * (begin + t) + 0 * xs[t] for loss, t in zip(losses, taken, strict=True)).backward()
            expected += [loss.item() for loss in losses]
            gradients += [0.0 if x.grad is None else x.grad.item() for x in xs]
        assert found[micro.loss_mask_T].tolist() == pytest.approx(expected, rel=2e-4, abs=1e-5)
        assert flat.grad.tolist() == pytest.approx(gradients, rel=2e-4, abs=1e-4)
        assert all(torch.isfinite(each[micro.loss_mask_T]).all() for each in metrics.values())


@pytest.mark.parametrize("name", TARGETS)
def test_extreme_log_ratios_stay_finite(micro_of, name):
    for log_ratio in (1e4, -1e4, 200.0, -60.0):
        for advantage in (1.0, -1.0):
            old = [[-1e4 if log_ratio > 0 else 0.0] * 3]
            micro = micro_of([[1, 1, 1]], old_logprobs=old, behaviour_logprobs=old, advantages=[[advantage] * 3])
            logprobs = torch.tensor([x + log_ratio for x in old[0]]).requires_grad_()
            loss, metrics = getattr(policy_losses, name)(logprobs, micro, PolicyLossParams())
            loss.sum().backward()
            assert torch.isfinite(loss).all()
            assert torch.isfinite(logprobs.grad).all()
            assert all(torch.isfinite(each).all() for each in metrics.values())


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDS)
def test_every_loss_has_a_schema_whose_defaults_are_its_own(micro_of, name):
    record = RECORDS[name]
    function = load_target(record.target, owner=name)
    defaults = schema_of(record, Config, owner=name)().model_dump()
    assert "log_ratio_clamp" in defaults
    flat, micro = Batch(3).micro(micro_of)
    plain, _ = function(flat, micro, PolicyLossParams())
    spelled, _ = function(flat, micro, PolicyLossParams(options=defaults))
    assert torch.equal(plain[micro.loss_mask_T], spelled[micro.loss_mask_T])
    with pytest.raises(ValidationError):
        function(flat, micro, PolicyLossParams(options={"epsilon": 1.0}))


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ("CISPOOptions", {"clip_low": 5.0}),
        ("CISPOOptions", {"bounds": "relative", "clip_low": 1.5}),
        ("ClipCovOptions", {"cov_low": 5.0}),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(schema, given):
    with pytest.raises(ValidationError):
        load_target(f"roll_core.algorithms.options:{schema}", owner=schema)(**given)
