"""Data types of a run: engine requests and completions, scored samples, training sequences, weight manifests.

    prompt -> GenerateRequest -> infer strategy -> Completion -> Sample -> reward -> Group -> TrainSequence

All are frozen dataclasses of plain values and numpy arrays: cheap to send between processes, independent of torch,
never padded. Suffixes give shapes:

    P tokens of a prompt    R tokens of a response    L = P + R tokens of a sequence
    T flat tokens of a microbatch    S sequences of a microbatch    K top-k
    M mixture-of-experts layers, in the order of the model's layers; dense layers do not count
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from roll_core.errors import DataError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL import Image

TokenIds = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
RoutedExperts = npt.NDArray[np.unsignedinteger[Any]]
"""Experts chosen in a mixture-of-experts model, `[tokens, M, K]`: indices in the smallest sufficient unsigned integer
type, uint8 up to 256 experts. The K experts of a token and layer are a set; their order has no meaning."""

FinishReason = Literal["stop", "length", "abort"]
MediaKind = Literal["image", "video"]


# -- images and videos -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledFrames:
    """Which frames of a video were sampled."""

    indices: tuple[int, ...]
    """Indices of the sampled frames in the video, counted from 0. A frame may repeat."""
    num_frames: int
    """Number of frames of the video."""
    fps: float
    """Frames per second of the video."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SampledFrames:
        """The frames of `dataclasses.asdict`, which JSON has stored."""
        return cls(**{**values, "indices": tuple(values["indices"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image or a video that belongs to tokens of a sequence, as the bytes of a file.

    The file of a video is a TIFF with the sampled frames as pages and with `frames` as its description. Samples of a
    group share one object, and what is sent together to another process has one copy of its bytes.
    """

    digest: str
    """BLAKE2 of the bytes. Equal digests are equal images or videos: caches are keyed by it."""
    width: int
    """Number of pixels of a row."""
    height: int
    frames: SampledFrames | None = None
    """Sampled frames of a video; None for an image."""
    path: str = ""
    """File with the bytes; empty if `data` has them. Another process gets the bytes, not the path."""
    data: bytes = field(default=b"", repr=False, compare=False)

    def read(self) -> bytes:
        """The bytes. Raises `DataError` if the file has changed since the run read its rows, or no longer exists."""
        if not self.path:
            return self.data
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise DataError(f"{self.kind} {self.path} cannot be read any more: {error}") from error
        if media_digest(data) != self.digest:
            raise DataError(f"{self.kind} {self.path} has changed since the run read its rows")
        return data

    @property
    def kind(self) -> MediaKind:
        """`image` or `video`."""
        return "image" if self.frames is None else "video"

    def image(self) -> Image.Image:
        """The image, or the first frame of a video, decoded to RGB. Raises `DataError`."""
        return self.images()[0]

    def images(self) -> list[Image.Image]:
        """The image, or the sampled frames of a video, decoded to RGB. Raises `DataError`."""
        from PIL import Image, ImageSequence

        file = Image.open(io.BytesIO(self.read()))
        pages = [file] if self.frames is None else ImageSequence.Iterator(file)
        return [page.convert("RGB") for page in pages]

    def in_memory(self) -> Media:
        """The image or video with its bytes, for another process. Raises `DataError` as `read`."""
        return replace(self, path="", data=self.read())

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent_media, (self.digest, self.width, self.height, self.frames, self.read())


def _sent_media(digest: str, width: int, height: int, frames: SampledFrames | None, data: bytes) -> Media:
    return Media(digest=digest, width=width, height=height, frames=frames, data=data)


def media_digest(data: bytes) -> str:
    """Digest of the bytes of an image or video (`Media.digest`)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- generation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters.

    Order of operations, the same for every infer strategy: repetition penalty, masks, temperature, top-k, top-p, min-p,
    sampling. `temperature == 0` selects the most likely token. Masked are end tokens until `min_new_tokens`, and always
    the tokens that a model with images reserves for them (`roll_core.data.processor.Processor.media_token_ids`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the smallest set of tokens whose total probability reaches `top_p`; 1 keeps all."""
    top_k: int = 0
    """Keep the `top_k` most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least `min_p` times that of the most likely token."""
    repetition_penalty: float = 1.0
    """CTRL's penalty (arXiv:1909.05858 §4.1) over prompt and response; 1 disables it."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded response contains one of these. Its tokens are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, in addition to the model's end-of-sequence ids. The end token is kept."""
    ignore_eos: bool = False
    """Generate `max_new_tokens` tokens, whatever is sampled."""
    seed: int | None = None
    """Seeds output `i` of a request with `(seed, i)`, so that its tokens do not depend on the rest of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Request for `n` outputs of one prompt. The outputs share its prefill."""

    id: str
    prompt_ids: TokenIds
    """`[P]`, at least one token."""
    media: tuple[Media, ...] = ()
    """Images of the prompt in the order of their tokens, which `prompt_ids` has expanded: as many image tokens as the
    model has features (capability `images`)."""
    params: SamplingParams
    n: int = 1
    prompt_logprobs: bool = False
    """Also return the prompt tokens' logprobs under softmax(logits), without temperature, since they were not sampled
    (capability `prompt_logprobs`)."""
    prompt_topk: int = 0
    """With `prompt_logprobs`: also return the K most likely tokens at each prompt token (capability `prompt_topk`)."""
    routed_experts: bool = False
    """Also return the experts that each token was routed to (capability `routed_experts`). Only for engines started
    with `ModelSpec.router_replay`."""
    priority: int = 0
    """Requests with lower values are served first."""
    routing_key: str = ""
    """Equal for requests with a common prefix, such as a row's prompt or an agent's session. Routers other than
    `least_loaded` send them to the same replica. Empty: the request id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One response: the token ids that the model generated, including the end token if there is one."""

    token_ids: TokenIds
    """`[R]`."""
    logprobs: Floats
    """`[R]`, logprob of each sampled token under `softmax(logits / temperature)`: with temperature (1 if it is 0),
    before penalties, masks, top-k, top-p and min-p. The train strategy computes the same quantity."""
    versions: npt.NDArray[np.int32]
    """`[R]`, weight version with which each token was sampled. Versions differ after an in-flight update."""
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop string or token id that ended the response, if any."""
    routed_experts: RoutedExperts | None = None
    """`[P + R - 1, M, K]`, experts of the prompt's and the response's tokens; only if requested. The last response
    token is missing: the model never processed it. Fewer rows if the engine has experts only for the first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The K most likely tokens at each of P positions, best first, under `softmax(logits)`. 0 at the first position."""

    ids: TokenIds
    """`[P, K]`."""
    logprobs: Floats
    """`[P, K]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of one `GenerateRequest`: `n` outputs in order of their index."""

    id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: Floats | None = None
    """`[P]`, 0 for the first token; only if requested."""
    prompt_topk: TopTokens | None = None
    """Most likely tokens in place of each prompt token, given the tokens before it; only if requested."""


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Result of a reward function for a sample: a value or a failure. A failure is never 0."""

    value: float | None
    """None if and only if `failure` is set."""
    failure: str = ""
    """Why no value could be computed (a timeout, a dead sandbox, an exception); empty if there is a value."""
    detail: Mapping[str, float | str] = field(default_factory=dict)
    """Components of the value to record (format, accuracy), shown with the sample."""

    @property
    def failed(self) -> bool:
        """True if there is no value."""
        return self.value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of a rollout: the tokens that the model read, then the tokens that it sampled.

    The prompt of a turn is the whole sequence of its parent, followed by `context_ids`: prefixes are equal by
    construction.
    """

    parent: int | None = None
    """Index in the rollout of the earlier turn that this turn continues. None: `context_ids` are the whole prompt."""
    context_ids: TokenIds
    """`[C]`, tokens read since the last token of the parent."""
    media: tuple[Media, ...] = ()
    """Images in `context_ids`."""
    sampled_ids: TokenIds
    """`[R]`, as reported by the engine."""
    logprobs: Floats
    """`[R]`."""
    versions: npt.NDArray[np.int32]
    """`[R]`."""
    loss_mask: Bools
    """`[R]`, True for sampled tokens to train on."""
    finish_reason: FinishReason
    observation_mask: Bools | None = None
    """`[C]`, True for the text of messages that followed the parent; None if it is not recorded."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens from the parent's last one (without a parent: from the first) to the last but one; `[C + R,
    M, K]` (without a parent `[C + R - 1, M, K]`) or fewer rows."""
    reward: float | None = None
    """Reward of this turn; None if the environment made no statement."""
    state: str | int | None = None
    """State of the environment in which the turn began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment for this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The turns of an episode in the order in which they were sampled: a tree, see `TurnRecord.parent`.

    `roll_core.data.rollouts.rows` cuts it into training rows. A single chain of turns is one row.
    """

    turns: tuple[TurnRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and one response as token ids, with all their data.

    A multi-turn sample has its `rollout`. Its response is then a transcript: all turns in order, with the tokens that
    the model read between them.
    """

    id: str
    """`<row>/<epoch>/<index in group>`; stable, also in a resumed run."""
    group_id: str
    """Id shared by all samples of one prompt, `<row>/<epoch>`."""
    prompt_ids: TokenIds
    response_ids: TokenIds
    media: tuple[Media, ...] = ()
    """Images of the prompt, and of the environment's messages in the response, in the order of their tokens."""
    logprobs: Floats
    """`[R]`, behaviour logprobs as reported by the engine; 0 for tokens from an environment."""
    loss_mask: Bools
    """`[R]`, True for generated tokens to train on, False for tokens from an environment."""
    versions: npt.NDArray[np.int32]
    """`[R]`, weight version of each generated token; -1 for tokens from an environment."""
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """`[P + R - 1, M, K]` or fewer rows, as reported by the engine."""
    tag: str = ""
    """Domain. It selects the reward and determines the fraction in a batch."""
    reward: Reward | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row (ground truth, difficulty), as plain values."""
    rollout: Rollout | None = None
    """The turns of a multi-turn sample; None for a single turn."""
    player: str = ""
    """Player of a game of several; its name ends the id. Empty if the episode has one sample."""

    @property
    def episode(self) -> str:
        """Id of the episode: that of the sample, without the player."""
        return self.id.removesuffix(f"/{self.player}") if self.player else self.id

    def with_reward(self, reward: Reward) -> Sample:
        """Copy of the sample with this reward."""
        return replace(self, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt, in order of their index."""

    id: str
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    """A response that only the rewards of `samples` are compared with; never trained on."""

    @property
    def multi_turn(self) -> bool:
        """True if its samples have turns."""
        return any(sample.rollout is not None for sample in self.samples)

    @property
    def num_episodes(self) -> int:
        """Number of episodes: that of the samples, but the players of an episode count once."""
        return len({sample.episode for sample in self.samples})

    def by_player(self) -> list[tuple[Sample, ...]]:
        """Samples that are compared with each other: those of each player, or all."""
        players = dict.fromkeys(sample.player for sample in self.samples)
        return [tuple(sample for sample in self.samples if sample.player == player) for player in players]


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One training sequence. Every array has the sequence's length L and is aligned to its tokens.

    Position `t` refers to token `t` itself: `old_logprobs[t]` is the logprob of token `t` given the tokens before it.
    Only the fields that the loss needs are set.
    """

    id: str
    tokens: TokenIds
    """`[L]`."""
    media: tuple[Media, ...] = ()
    """Images in the order of their tokens. Truncating `tokens` must not cut through them."""
    loss_mask: Bools
    """`[L]`, True where token `t` contributes to the loss. Normally false for the whole prompt; always false for `t =
    0`."""
    sampled_mask: Bools | None = None
    """`[L]`, True for tokens that the policy sampled, in the loss or not: advantages and the critic read all of them.
    None: those of `loss_mask`."""
    group: int = 0
    """Index of the sequence's group in the batch."""
    rollout: int | None = None
    """Index of the sequence's rollout in the batch, from 0. The rows of an episode share one index and one optimizer
    step. None: the row is a rollout of its own."""
    unit: int | None = None
    """Sequences with equal `unit` are adjacent, on one rank and in one microbatch: the pairs of preference training.
    From 0; the same for all rows of a rollout. None: the row is a unit of its own."""
    streams: Mapping[str, Floats] = field(default_factory=dict)
    """Per-token weights `[L]` of further loss terms, by name; 0 for `t = 0`. A missing stream has weights 0."""
    old_logprobs: Floats | None = None
    """`[L]`, under the weights at the start of the update (the denominator of the PPO ratio)."""
    behaviour_logprobs: Floats | None = None
    """`[L]`, as reported by the engine when it sampled the tokens."""
    ref_logprobs: Floats | None = None
    """`[L]`, under the reference model."""
    advantages: Floats | None = None
    """`[L]`."""
    returns: Floats | None = None
    """`[L]`, the critic's regression target."""
    values: Floats | None = None
    """`[L]`, the critic's values at the start of the update."""
    gather_ids: TokenIds | None = None
    """`[L, K]`, token ids whose logprobs are requested at each position, with K equal for all sequences of a batch."""
    teacher_logprobs: Floats | None = None
    """`[L, K]`, logprobs of `gather_ids` under the teacher of distillation."""
    teacher_hidden: Floats | None = None
    """`[L, H]`, inputs of the teacher's head."""
    routed_experts: RoutedExperts | None = None
    """`[L - 1, M, K]` or fewer rows: experts to use for the first tokens instead of the router's choice. The router
    chooses for the remaining tokens."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Denominators of the global objective: over all microbatches and all data-parallel ranks of one optimizer step."""

    tokens: int
    """Tokens whose loss mask is true."""
    sequences: int
    """Sequences with at least one such token."""
    rollouts: int
    """Rollouts with at least one such token: `sequences`, unless a rollout has several rows."""
    groups: int
    """Groups with at least one such sequence."""
    max_length: int
    """Maximum length of a masked span, the constant of Dr. GRPO's aggregation (`seq-mean-token-sum-norm`)."""
    rollout_tokens: Mapping[int, int] = field(default_factory=dict)
    """Masked tokens of each rollout that sequences name, by `TrainSequence.rollout`."""
    streams: Mapping[str, float] = field(default_factory=dict)
    """Sum of the weights of each stream (`TrainSequence.streams`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRank:
    """The share of the data that a rank works on. All ranks of one model replica have the same `index`."""

    index: int = 0
    size: int = 1
    leader: bool = True
    """True if this rank's results are collected for its replica."""


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Dtype as safetensors spells it: `F32`, `BF16`, `F16`."""
    shape: tuple[int, ...]
    digest: str
    """Digest of the tensor's bytes in row-major order; see `roll_core.spec.weights`. Until the tensor is sent, only the
    name of the digest's function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The tensors that a publish must deliver."""

    version: int
    tensors: tuple[TensorEntry, ...]
    unsent: tuple[TensorEntry, ...] = ()
    """Tensors that are not sent, because the engine has loaded them in an earlier publish. Only for engines with
    `keeps_weights`."""

    @property
    def loaded(self) -> tuple[TensorEntry, ...]:
        """All tensors that the engine must have after the publish."""
        return (*self.tensors, *self.unsent)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """The tensors that a receiver has after a publish, with digests computed from its own memory."""

    version: int
    digests: Mapping[str, str]
    """Digest of every tensor that the receiver has, by name."""
    role: str = ""
    rank: int = 0


document_fields(__name__)
