"""What `rollout_sim` simulates: single answers (rlvr) and trajectories of agents (agentic), and how much work they are.

**rlvr.** Answers with a long tail of lengths, 16 to a prompt.

**agentic.** One request to the scheduler is one trajectory of turns (there is no pipeline for agents yet, so turns and
environments are inside the simulated engine, `shared_tests.simulated_agents`): a turn is drawn, the environment
works, its observation is computed, the next turn is drawn. Shapes and their sources:

* groups of 8, at most 60 turns of at most 2,048 drawn tokens, at most 32,768 tokens in all: alibaba/ROLL's public
  settings for agents (`group_size: 8` in its guide to asynchronous rollouts; `max_actions_per_traj`,
  `max_tokens_per_step` and `sequence_length` in `examples/agentic_demo/agent_val_rock_swe.yaml`);
* numbers of turns, lengths of turns and of observations: log-normal, assumed;
* environments: Gaussian latencies of 10 ± 5 s; one call in 100 takes ten times as long, and one in 1,000 fails, which
  is noticed after a minute, and a new environment takes another to repeat the trajectory's actions before it goes on;
  assumed, too.

While its environment works a trajectory draws nothing but keeps its keys and values on the accelerator, where there is
room for those of `PLACES` trajectories: of 8,000 tokens on average at 57 KB (28 layers, 4 heads of 128 for keys and
values, 16 bits) they take 117 GB of 141. Training computes prompts and observations, too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shared_tests.simulated_agents import Environments, SimulatedAgents, Trajectory
from shared_tests.simulation import SimulatedEngine, Speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Group

UNIT = 16
"""Tokens that are simulated as one: it makes no difference to the scheduler, and 4,096 accelerators fit into memory."""
SPEED = Speed(base_s=0.012 * UNIT, row_s=0.00006 * UNIT, prompt_token_s=0.00002 * UNIT, max_rows=128)
"""About a model of 7 B on one current accelerator, with room for 128 long sequences: 6,500 tokens/s when full."""
TOKENS_PER_S = SPEED.capacity * UNIT
TRAIN_TOKENS_PER_S = 8000.0
"""Of one accelerator, logprobs of the old policy included."""
PROMPT_TOKENS = 512
PROMPT = np.zeros(PROMPT_TOKENS // UNIT, dtype=np.int64)
PLACES = 256
"""Trajectories of agents whose keys and values an accelerator has room for; 128 of them draw at once."""


@dataclass(frozen=True)
class Work:
    """Of a step, in seconds of one accelerator."""

    generate_s: float
    """On full engines."""
    train_s: float
    longest_s: float
    """Of the longest answer, alone on its engine."""

    def bound_s(self, accelerators: int) -> float:
        """Of a step on which every accelerator works all the time."""
        return (self.generate_s + self.train_s) / accelerators


@dataclass(frozen=True)
class Load:
    """Single answers."""

    name: str
    groups_per_accelerator: int
    median: float
    longest: int
    sigma: float = 0.9
    group: int = 16
    max_running = SPEED.max_rows
    """As `max_running_requests`."""
    enough = 130_000
    """Answers over which a step's time is taken: it hardly depends any more on which they are."""

    def draw(self, groups: int) -> Answers:
        """Of so many prompts."""
        return Answers(self, groups)

    def rate(self, in_flight: float) -> float:
        """Of what an engine draws with so many answers in flight, the share of what a full one does."""
        return 1.0

    @property
    def typical(self) -> tuple[float, float]:
        """Seconds of a full engine and of a trainer, in proportion."""
        return 1 / TOKENS_PER_S, 1 / TRAIN_TOKENS_PER_S

    def __str__(self) -> str:
        return (
            f"{self.groups_per_accelerator} groups of {self.group} answers a step for each accelerator, log-normal"
            f" lengths with a median of {self.median} tokens and σ {self.sigma}, cut at {self.longest:,}."
        )


class Answers:
    """Drawn once for all modes: `length(id, index)` of a prompt's answers."""

    def __init__(self, load: Load, groups: int) -> None:
        self.load = load
        rng = np.random.default_rng(0)
        drawn = rng.lognormal(math.log(load.median), load.sigma, size=(groups, load.group))
        self.table = np.clip(drawn / UNIT, 1, load.longest // UNIT).astype(np.int32)

    def __call__(self, id: str, index: int) -> int:
        return int(self.table[int(id.rpartition("/")[2]) % len(self.table), index])

    def engines(self, count: int) -> list[SimulatedEngine]:
        """That draw them."""
        return [SimulatedEngine(str(i), SPEED, self, prompt_tokens=len(PROMPT), real=False) for i in range(count)]

    def work(self, batch: Sequence[Group]) -> Work:
        """Of a batch."""
        tokens = UNIT * sum(len(sample.response_ids) for group in batch for sample in group.samples)
        prefill_s = len(batch) * len(PROMPT) * SPEED.prompt_token_s
        longest_s = self.load.longest / UNIT / SPEED.tokens_per_s(1)
        return Work(tokens / TOKENS_PER_S + prefill_s, tokens / TRAIN_TOKENS_PER_S, longest_s)


@dataclass(frozen=True)
class AgentLoad:
    """Trajectories of agents."""

    name: str
    groups_per_accelerator: int
    group: int = 8
    turns: float = 15
    turns_sigma: float = 0.7
    most_turns: int = 60
    drawn: float = 180
    drawn_sigma: float = 0.8
    most_drawn: int = 2048
    observed: float = 250
    observed_sigma: float = 1.0
    most_observed: int = 4096
    most_tokens: int = 32_768
    away_s: float = 10.0
    away_spread_s: float = 5.0
    slow_share: float = 0.01
    slow_factor: float = 10.0
    failure_share: float = 0.001
    failure_s: float = 120.0
    max_running = PLACES
    enough = 50_000

    def draw(self, groups: int) -> Trajectories:
        """Of so many prompts."""
        return Trajectories(self, groups)

    def rate(self, in_flight: float) -> float:
        """Of what an engine draws with so many trajectories in flight, the share of what a full one does: r rows draw
        where r = in_flight × (time of a token in the engine) / (that and the environment's share of it)."""
        away_s, computed_s = self._per_token
        rows = SPEED.max_rows
        for _ in range(200):
            token_s = 1 / SPEED.tokens_per_s(rows)
            here_s = token_s + rows * computed_s  # whoever computes an observation holds up all rows
            rows = 0.5 * (rows + min(SPEED.max_rows, in_flight * here_s / (here_s + away_s)))
        computing_s = SPEED.max_rows * computed_s
        full = SPEED.max_rows / (1 / SPEED.tokens_per_s(SPEED.max_rows) + computing_s)
        return rows / (1 / SPEED.tokens_per_s(rows) + rows * computed_s) / full

    @property
    def _per_token(self) -> tuple[float, float]:
        """Seconds of the environment and of computing observations for each token (`UNIT`) that is drawn."""
        drawn, observed, away_s = self._mean
        return away_s / drawn, observed * SPEED.prompt_token_s / drawn

    @property
    def typical(self) -> tuple[float, float]:
        """Seconds of a full engine and of a trainer, in proportion."""
        drawn, observed, _ = self._mean
        return (
            drawn / SPEED.capacity + observed * SPEED.prompt_token_s,
            (drawn + observed) * UNIT / TRAIN_TOKENS_PER_S,
        )

    @property
    def _mean(self) -> tuple[float, float, float]:
        sample = some_of(self)
        return float(sample.drawn.sum()), float(sample.observed.sum()), float(sample.away_s.sum())

    def __str__(self) -> str:
        return (
            f"{self.groups_per_accelerator} groups of {self.group} trajectories a step for each accelerator;"
            f" log-normal numbers of turns (median {self.turns:g}, σ {self.turns_sigma}, at most {self.most_turns}),"
            f" tokens of a turn (median {self.drawn:g}, σ {self.drawn_sigma}, at most {self.most_drawn:,}) and of an"
            f" observation (median {self.observed:g}, σ {self.observed_sigma}, at most {self.most_observed:,});"
            f" {self.most_tokens:,} tokens at most. An environment takes {self.away_s:g} ± {self.away_spread_s:g} s"
            f" (Gaussian), {self.slow_factor:g} times as long in {self.slow_share:.1%} of its calls, and"
            f" {self.failure_s:g} s longer in the {self.failure_share:.1%} that fail and are repeated."
        )


class Trajectories:
    """Drawn once for all modes, turn after turn; in units."""

    def __init__(self, load: AgentLoad, groups: int) -> None:
        self.load = load
        rng = np.random.default_rng(0)
        num = groups * load.group
        turns = np.clip(np.rint(rng.lognormal(math.log(load.turns), load.turns_sigma, num)), 1, load.most_turns)
        starts = np.concatenate([[0], np.cumsum(turns.astype(np.int64))])
        size = int(starts[-1])
        drawn = _lengths(rng, load.drawn, load.drawn_sigma, load.most_drawn, size)
        observed = _lengths(rng, load.observed, load.observed_sigma, load.most_observed, size)
        observed[starts[:-1]] = 0
        away_s = rng.normal(load.away_s, load.away_spread_s, size).clip(min=0.1).astype(np.float32)
        away_s[rng.random(size) < load.slow_share] *= load.slow_factor
        away_s[rng.random(size) < load.failure_share] += load.failure_s
        away_s[starts[1:] - 1] = 0.0
        # A trajectory ends with the turn before the one that would take it over the limit.
        each = np.repeat(np.arange(num), np.diff(starts))
        so_far = np.cumsum(drawn + observed)
        before = np.concatenate([[0], so_far])[starts[:-1]]
        fits = so_far - before[each] + len(PROMPT) <= load.most_tokens // UNIT
        fits[starts[:-1]] = True
        counts = np.bincount(each[fits], minlength=num)
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.drawn, self.observed, self.away_s = drawn[fits], observed[fits], away_s[fits]
        self.away_s[self.starts[1:] - 1] = 0.0
        self.groups = groups

    def __call__(self, id: str, index: int) -> Trajectory:
        turns = self._turns(int(id.rpartition("/")[2]), index)
        return Trajectory(
            generated_K=self.drawn[turns], observed_K=self.observed[turns], environment_s_K=self.away_s[turns]
        )

    def _turns(self, position: int, index: int) -> slice:
        at = position % self.groups * self.load.group + index
        return slice(int(self.starts[at]), int(self.starts[at + 1]))

    def engines(self, count: int) -> list[SimulatedEngine]:
        """That draw them."""
        environments = Environments()
        return [
            SimulatedAgents(str(i), SPEED, self, environments, prompt_tokens=len(PROMPT), real=False)
            for i in range(count)
        ]

    def work(self, batch: Sequence[Group]) -> Work:
        """Of a batch."""
        drawn = observed = 0
        longest_s = 0.0
        for group in batch:
            for index in range(len(group.samples)):
                turns = self._turns(int(group.id), index)
                own_drawn, own_observed = int(self.drawn[turns].sum()), int(self.observed[turns].sum())
                alone_s = own_drawn / SPEED.tokens_per_s(1) + (own_observed + len(PROMPT)) * SPEED.prompt_token_s
                longest_s = max(longest_s, alone_s + float(self.away_s[turns].sum()))
                drawn, observed = drawn + own_drawn, observed + own_observed
        samples = sum(len(group.samples) for group in batch)
        prefill_s = (len(batch) * len(PROMPT) + observed) * SPEED.prompt_token_s
        trained = (drawn + observed + samples * len(PROMPT)) * UNIT
        return Work(drawn / SPEED.capacity + prefill_s, trained / TRAIN_TOKENS_PER_S, longest_s)


@cache
def some_of(load: AgentLoad) -> Trajectories:
    """Enough to know their means."""
    return Trajectories(load, 2000)


def _lengths(rng: np.random.Generator, median: float, sigma: float, most: int, size: int) -> np.ndarray:
    drawn = rng.lognormal(math.log(median), sigma, size)
    return np.clip(np.rint(drawn / UNIT), 1, most // UNIT).astype(np.int32)


LOADS = {
    "rlvr": (
        Load("full", groups_per_accelerator=16, median=3000, longest=16_384),
        Load("long tail", groups_per_accelerator=4, median=3500, longest=32_768),
    ),
    "agentic": (
        AgentLoad("agents", groups_per_accelerator=32),
        AgentLoad("few agents", groups_per_accelerator=4),
    ),
}
"""`full` is 128 prompts × 16 answers a step on 8 accelerators. In `long tail` the longest answer alone takes several
times as long as the accelerators would need for all of them. `agents` is as many trajectories for each accelerator as
`full` has answers; `few agents` is 128 groups of 8 on 32 accelerators, ROLL's default number of groups."""

PUBLISHED = {"rlvr": 2.24, "agentic": 2.72}
"""Asynchronous over synchronous with the same accelerators: the most that ROLL Flash reports (arXiv:2510.11345)."""


def described(name: str) -> dict[str, Any]:
    """The workload's numbers."""
    found: dict[str, Any] = {
        "loads": [asdict(load) for load in LOADS[name]],
        "prompt_tokens": PROMPT_TOKENS,
        "engine_tokens_per_s": round(TOKENS_PER_S),
        "max_rows": SPEED.max_rows,
        "train_tokens_per_s": TRAIN_TOKENS_PER_S,
    }
    return found | ({"places": PLACES} if name == "agentic" else {})
