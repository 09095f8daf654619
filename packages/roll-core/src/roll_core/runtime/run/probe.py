"""Logprob probe, the end-to-end check of weight sync: trainer and replicas compute logprobs of the same tokens.

Digests prove that an engine loaded the right bytes; the probe proves that it computes with them. It detects stale
caches and fused copies, an architecture that differs from the trainer's, wrong logprobs, and a confirmed publish that
was never loaded.

    fixed tokens       prompt logprobs, if the engine returns them     compared with the trainer's, and with the
    sampled tokens     logprobs of a few tokens after fixed prompts    previous probe: do both sides change?
    an image           logprobs of the tokens after it, prompt and     compared with the trainer's: both need the same
                       sampled, if the engine reads images             pixels, encoder and positions

With router replay the trainer routes each token to the replica's experts, as in training. Without it a router may
choose other experts after a small change of the weights, at one side only: that token and all later ones of its
sequence move far. So one sequence, or one token, does not prove that weights are stale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roll_core.data.media import image_media
from roll_core.errors import NonFiniteError, StaleWeightsError, WeightSyncError
from roll_core.runtime.rollout.program import PROBE
from roll_core.spec.train import WantedOutputs
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.run.roles import GroupInferRole
    from roll_core.spec.pipeline import TrainRole
    from roll_core.spec.providers import InferCapabilities
    from roll_core.types import Completion, Floats, Media, RoutedExperts, TokenIds

IMAGE_SIZE = 96, 64
"""Width and height of the probe's image."""
SAMPLED_PROMPT, SAMPLED_TOKENS = 8, 16
"""Maximum prompt and response length of a sampled sequence in tokens; together shorter than `PROBE_TOKENS`."""
MOVED = 1e-4
"""Nats by which the trainer's logprobs must move before an engine must follow: engines in fp32 differ by less."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs of the same tokens, computed by a replica and by the trainer; shape [num_tokens] each."""

    tokens: TokenIds
    engine: Floats
    trainer: Floats

    @property
    def gap(self) -> float:
        """Mean absolute difference in nats."""
        return _distance(self.engine, self.trainer)

    def is_stale(self, before: Compared) -> bool:
        """True if the trainer's logprobs moved since `before`, far beyond the noise between both sides, and the
        replica's did not: neither on average nor at the median token."""
        if not np.array_equal(self.tokens, before.tokens):
            return False
        trainer, engine = np.abs(self.trainer - before.trainer), np.abs(self.engine - before.engine)
        moved = float(trainer.mean())
        return (
            moved > max(4 * before.gap, MOVED)
            and float(engine.mean()) < moved / 10
            and float(np.median(engine)) <= float(np.median(trainer)) / 10
        )


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """Probe result of one replica: its logprobs beside the trainer's, by sequence."""

    fixed: tuple[Compared, ...]
    """Empty for an engine without prompt logprobs."""
    sampled: tuple[Compared | None, ...]
    """By prompt; None if the replica sampled nothing or ids outside the trainer's vocabulary. Rollout checks report
    such ids."""
    image: tuple[Compared, ...] = ()
    """Tokens after an image; empty if the probe had none."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Tokens with one image."""

    tokens: TokenIds
    media: Media
    end: int
    """Number of tokens up to the last one of the image."""


def image_prompt(tokens: TokenIds, tokenizer: PreTrainedTokenizerBase, max_length: int) -> ImagePrompt | None:
    """A generated image between some of `tokens`, which are text.

    None for a model of text, and if `max_length` has no room for the image and a sampled token.
    """
    from roll_core.data.processor import processor_of

    if (processor := processor_of(tokenizer)) is None:
        return None
    from PIL import Image

    media = image_media(Image.radial_gradient("L").resize(IMAGE_SIZE))
    text = processor.expand(processor.placeholder, [media])
    image = np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    before, after = tokens[: SAMPLED_PROMPT // 2], tokens[SAMPLED_PROMPT // 2 : SAMPLED_PROMPT]
    all_tokens = np.concatenate([before, image, after])
    if len(all_tokens) >= max_length:
        return None
    last = int(np.flatnonzero(all_tokens == processor.image_token_id)[-1])
    return ImagePrompt(all_tokens, media, last + 1)


def mean_gap(sequences: Sequence[Compared | None]) -> float | None:
    """Mean of the sequences' gaps in nats; None without sequences."""
    gaps = [sequence.gap for sequence in sequences if sequence is not None]
    return sum(gaps) / len(gaps) if gaps else None


async def logprob_probe(
    train: TrainRole,
    infer: GroupInferRole,
    tokens: TokenIds,
    *,
    can: InferCapabilities,
    vocab_size: int,
    max_length: int,
    image: ImagePrompt | None = None,
    replays_experts: bool = False,
) -> dict[int, ProbeReading]:
    """Probe every replica that is alive at temperature 1 and return the readings by rank.

    No request is longer than `max_length`, the run's longest sequence: models and engines may have no room for more.
    `image` is also sampled from: trainer and engine read images. `replays_experts`: both roles were started with router
    replay.

    Raises `NonFiniteError` if a logprob is NaN or infinite, and `WeightSyncError` if the trainer or a replica returns
    no or too few logprobs.
    """
    size = min(SAMPLED_PROMPT, len(tokens) - 1)
    prompts = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, SAMPLED_PROMPT)]
    num_sampled = max(1, min(SAMPLED_TOKENS, max_length - size))

    def request(
        id: str, prompt: TokenIds, max_new_tokens: int, *, media: tuple[Media, ...] = (), prompt_logprobs: bool = False
    ) -> GenerateRequest:
        seed = 0 if can.seeds else None
        return GenerateRequest(
            id=id,
            prompt_ids=prompt,
            media=media,
            params=SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, seed=seed),
            prompt_logprobs=prompt_logprobs,
            routed_experts=replays_experts,
            priority=PROBE,
        )

    prompt_logprobs = [request("probe", tokens, 1, prompt_logprobs=True)] if can.prompt_logprobs else []
    sampling = [request(f"probe sampled {i}", prompt, num_sampled) for i, prompt in enumerate(prompts)]
    of_image: list[GenerateRequest] = []
    if image is not None:
        num = min(SAMPLED_TOKENS, max_length - len(image.tokens))
        of_image = [
            request("probe image", image.tokens, num, media=(image.media,), prompt_logprobs=can.prompt_logprobs)
        ]
    completions = await infer.generate_on_each([*prompt_logprobs, *sampling, *of_image])
    fixed = {rank: of_rank[0] for rank, of_rank in completions.items() if prompt_logprobs}
    sampled = {
        (rank, i): completion.outputs[0]
        for rank, of_rank in completions.items()
        for i, completion in enumerate(of_rank[len(prompt_logprobs) :][: len(sampling)])
        if completion.outputs and _exist(completion.outputs[0].token_ids, vocab_size)
    }
    sequences = {"fixed": _sequence("fixed", tokens, 1)}
    for rank, completion in fixed.items():
        if completion.outputs and (experts := completion.outputs[0].routed_experts) is not None:
            id = f"fixed {rank}"  # each replica may have chosen others
            sequences[id] = _sequence(id, tokens, 1, experts)
    for (rank, i), output in sampled.items():
        id = f"sampled {rank} {i}"
        sequences[id] = _sequence(id, np.concatenate([prompts[i], output.token_ids]), size, output.routed_experts)
    after_image = {
        rank: _after_image(image, of_rank[-1], vocab_size)
        for rank, of_rank in completions.items()
        if image is not None and of_rank[-1].outputs
    }
    sequences |= {f"image {rank}": sequence for rank, (sequence, _) in after_image.items()}
    scored = await train.score(list(sequences.values()), WantedOutputs(logprobs=True))
    if scored.logprobs is None:
        raise WeightSyncError(f"{train.name} returned no logprobs of the probe tokens")
    by_trainer = dict(zip(sequences, scored.logprobs, strict=True))
    for logprobs in by_trainer.values():
        _require_finite(train.name, logprobs)

    def reading(rank: int) -> ProbeReading:
        who = f"{infer.name} rank {rank}"
        expected = by_trainer.get(f"fixed {rank}", by_trainer["fixed"])
        first = (_fixed(fixed[rank], tokens, expected, who),) if rank in fixed else ()
        sampled_tokens = tuple(response(rank, i) for i in range(len(prompts)))
        if rank not in after_image:
            return ProbeReading(first, sampled_tokens)
        sequence, logprobs = after_image[rank]
        _require_finite(who, logprobs)
        start = len(sequence.tokens) - len(logprobs)
        of_image = Compared(sequence.tokens[start:], logprobs, by_trainer[f"image {rank}"][start:])
        return ProbeReading(first, sampled_tokens, (of_image,) if len(logprobs) else ())

    def response(rank: int, i: int) -> Compared | None:
        if (output := sampled.get((rank, i))) is None:
            return None
        _require_finite(f"{infer.name} rank {rank}", output.logprobs)
        return Compared(output.token_ids, output.logprobs, by_trainer[f"sampled {rank} {i}"][size:])

    return {rank: reading(rank) for rank in sorted(completions)}


def check_follows(who: str, version: int, before: ProbeReading | None, now: ProbeReading) -> None:
    """Raise `StaleWeightsError` if a replica still computes with the weights of the probe `before`: most sequences of a
    part are stale."""
    if before is None:
        return
    for earlier, later in ((before.fixed, now.fixed), (before.sampled, now.sampled)):
        pairs = zip(earlier, later, strict=False)
        stale = [(one, other) for one, other in pairs if one and other and other.is_stale(one)]
        if 2 * len(stale) > len(later):
            one, other = stale[0]
            raise StaleWeightsError(
                f"{who} confirmed weight version {version}, but computes with older weights: since the last probe the"
                f" trainer's logprobs of the same tokens changed by {_distance(other.trainer, one.trainer):.4g}, the"
                f" engine's by {_distance(other.engine, one.engine):.4g}"
            )


def _sequence(id: str, tokens: TokenIds, prompt: int, experts: RoutedExperts | None = None) -> TrainSequence:
    mask = np.arange(len(tokens)) >= prompt
    return TrainSequence(id=f"probe {id}", tokens=tokens, loss_mask=mask, routed_experts=experts)


def _after_image(image: ImagePrompt, completion: Completion, vocab_size: int) -> tuple[TrainSequence, Floats]:
    """The prompt with the sampled tokens, and the engine's logprobs of its last tokens, all after the image."""
    output = completion.outputs[0]
    exist = _exist(output.token_ids, vocab_size)
    response, logprobs = (output.token_ids, output.logprobs) if exist else (output.token_ids[:0], output.logprobs[:0])
    if completion.prompt_logprobs is not None:
        logprobs = np.concatenate([completion.prompt_logprobs[image.end :], logprobs])
    tokens = np.concatenate([image.tokens, response])
    sequence = _sequence("image", tokens, image.end, output.routed_experts)
    return replace(sequence, media=(image.media,)), logprobs


def _exist(ids: TokenIds, vocab_size: int) -> bool:
    return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def _fixed(completion: Completion, tokens: TokenIds, expected: Floats, who: str) -> Compared:
    logprobs = completion.prompt_logprobs
    if logprobs is None or len(logprobs) != len(expected):
        num = 0 if logprobs is None else len(logprobs)
        raise WeightSyncError(f"{who} returned {num} logprobs for {len(expected)} probe tokens")
    _require_finite(who, logprobs)
    return Compared(tokens[1:], logprobs[1:], expected[1:])


def _distance(one: Floats, other: Floats) -> float:
    return float(np.abs(one.astype(np.float64) - other).mean())


def _require_finite(who: str, logprobs: Floats) -> None:
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise NonFiniteError(f"{who}: the logprob of probe token {wrong[0]} is {logprobs[wrong[0]]}, not finite")
