"""The plain values that flow through a run: what goes to an engine, what comes back, what is trained on.

    prompt -> GenerateRequest -> infer strategy -> Completion -> Sample -> reward -> Group -> TrainSequence

Everything here is a frozen dataclass of plain values and numpy arrays: it is cheap to send between processes,
needs neither torch nor ray, and is never padded. Shapes are given by suffix:

    P tokens of a prompt    R tokens of a response    L = P + R tokens of a sequence
    T flat tokens of a microbatch    S sequences of a microbatch    K top-k
    M layers of a mixture of experts, in the order of the model's layers; dense layers do not count
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

TokenIds = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
RoutedExperts = npt.NDArray[np.unsignedinteger[Any]]
"""Experts that a mixture of experts chose, `[tokens, M, K]`: indices in the smallest unsigned integers that hold them,
uint8 up to 256 experts. The K of a token and layer are a set; their order means nothing."""

FinishReason = Literal["stop", "length", "abort"]


# -- generation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from the model's distribution.

    Order of operations, the same for every infer strategy: repetition penalty, `min_new_tokens` (end tokens
    masked), temperature, top-k, top-p, min-p, draw. `temperature == 0` takes the most likely token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches `top_p`; 1 keeps all."""
    top_k: int = 0
    """Most likely `top_k` tokens; 0 keeps all."""
    min_p: float = 0.0
    """Tokens at least `min_p` times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """CTRL's penalty (arXiv:1909.05858 §4.1) over prompt and response; 1 is none."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded response contains one of these; its tokens are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's end-of-sequence ids; the end token is kept."""
    ignore_eos: bool = False
    """Go on to `max_new_tokens` whatever is drawn."""
    seed: int | None = None
    """Seeds output `i` of a request with `(seed, i)`: the same tokens whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token ids in. `n` outputs are drawn for one prompt, whose prefill they share."""

    id: str
    prompt_ids: TokenIds
    """`[P]`, at least one token."""
    params: SamplingParams
    n: int = 1
    prompt_logprobs: bool = False
    """Also return the logprobs of the prompt's own tokens under softmax(logits), without temperature, as nothing was
    sampled there (capability `prompt_logprobs`)."""
    routed_experts: bool = False
    """Also return the experts that each token was sent to (capability `routed_experts`). Asked only of an engine that
    was started with `ModelSpec.router_replay`."""
    priority: int = 0
    """Lower is served first where an engine has to choose."""
    routing_key: str = ""
    """The same for requests that begin alike (a row's prompt, an agent's session), which are then asked of one replica
    where routing heeds it; empty is the id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One response: the ids that the model produced, including the end token if it produced one."""

    token_ids: TokenIds
    """`[R]`."""
    logprobs: Floats
    """`[R]`, of each drawn token under `softmax(logits / temperature)`: temperature applied (1 where it is 0), before
    penalties and top-k, top-p, min-p. The train strategy computes the same quantity."""
    versions: npt.NDArray[np.int32]
    """`[R]`, the weight version under which each token was drawn (they differ after an in-flight update)."""
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop string or token id that ended it, if one did."""
    routed_experts: RoutedExperts | None = None
    """`[P + R - 1, M, K]`, of the prompt's tokens and of all but the last of the response, which was drawn and never
    computed; only if asked for. Fewer rows where the engine knows of fewer tokens, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one `GenerateRequest`: `n` outputs in order of their index."""

    id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: Floats | None = None
    """`[P]`, 0 for the first token; only if asked for."""


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a reward function said of a sample: a value, or a failure to find one. A failure is never 0."""

    value: float | None
    """None exactly when `failure` is set."""
    failure: str = ""
    """Why no value could be computed (a timeout, a dead sandbox, an exception), empty if there is one."""
    detail: Mapping[str, float | str] = field(default_factory=dict)
    """Parts of the value worth recording (format, accuracy), shown with the sample."""

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and one response as token ids, with everything known about it."""

    id: str
    """Stable: `<row>/<epoch>/<index in group>`, the same in a resumed run."""
    group_id: str
    """All samples of one prompt, `<row>/<epoch>`."""
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: Floats
    """`[R]`, behaviour logprobs as the engine reported them; 0 where `loss_mask` is false."""
    loss_mask: Bools
    """`[R]`, true for tokens that the model drew, false for what an environment wrote."""
    versions: npt.NDArray[np.int32]
    """`[R]`, weight version of each token, -1 where `loss_mask` is false."""
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """`[P + R - 1, M, K]` or fewer rows, as the engine reported them."""
    tag: str = ""
    """Domain, which chooses the reward and the ratio in the batch."""
    reward: Reward | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns (ground truth, difficulty), plain values."""

    def with_reward(self, reward: Reward) -> Sample:
        """The same sample, judged."""
        return replace(self, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt, in order of their index."""

    id: str
    samples: tuple[Sample, ...]


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence as a trainer sees it: every array has the sequence's length L and is aligned to its tokens.

    Position `t` holds what concerns token `t` itself: `old_logprobs[t]` is the logprob of token `t` given those
    before it.
    Only what a loss needs is set.
    """

    id: str
    tokens: TokenIds
    """`[L]`."""
    loss_mask: Bools
    """`[L]`, true where token `t` takes part in the loss; false for the whole prompt and always for `t = 0`."""
    group: int = 0
    """Index of the sequence's group in the batch."""
    old_logprobs: Floats | None = None
    """`[L]`, under the weights at the start of the update (the PPO ratio's denominator)."""
    behaviour_logprobs: Floats | None = None
    """`[L]`, as the engine reported them while it drew the tokens."""
    ref_logprobs: Floats | None = None
    """`[L]`, under the reference model."""
    advantages: Floats | None = None
    """`[L]`."""
    returns: Floats | None = None
    """`[L]`, the critic's target."""
    values: Floats | None = None
    """`[L]`, the critic's own values at the start of the update."""
    routed_experts: RoutedExperts | None = None
    """`[L - 1, M, K]` or fewer rows: the experts to send the first tokens to instead of those that the router would
    choose. It chooses for the others itself."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Denominators of the global objective: over all microbatches and all data-parallel ranks of one optimizer step."""

    tokens: int
    """Tokens whose loss mask is true."""
    sequences: int
    """Sequences with at least one such token."""
    groups: int
    """Groups with at least one such sequence."""
    max_length: int
    """Longest masked span length allowed, the constant of Dr. GRPO's aggregation (`seq-mean-token-sum-norm`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRank:
    """Which share of the data a rank works on: all ranks of one model replica have the same `index`."""

    index: int = 0
    size: int = 1
    leader: bool = True
    """Whether this rank's results are the ones collected for its replica."""


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """As safetensors spells it: `F32`, `BF16`, `F16`."""
    shape: tuple[int, ...]
    digest: str
    """Of the bytes in row-major order; see `roll_core.runtime.weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a publish must deliver."""

    version: int
    tensors: tuple[TensorEntry, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(entry.name for entry in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """What a receiver holds after a publish, digested from its own memory."""

    version: int
    digests: Mapping[str, str]
    """Name to digest, for every tensor that it holds."""
    role: str = ""
    rank: int = 0


document_fields(__name__)
