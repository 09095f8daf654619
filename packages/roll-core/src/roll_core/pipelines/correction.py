"""Applies `train_infer_correction` to a batch: weights multiply advantages, filters reduce the loss mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.algorithms.correction import Band, importance_weights, inside

if TYPE_CHECKING:
    from roll_core.pipelines.config import TrainInferCorrectionConfig
    from roll_core.pipelines.experience import Experience


def correct(experience: Experience, config: TrainInferCorrectionConfig) -> tuple[Experience, dict[str, float]]:
    """Corrected batch and metrics of the correction. Samples without any remaining token are dropped."""
    old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
    advantages_T = experience.flat("advantages")
    if old_T is None or behaviour_T is None or advantages_T is None:
        raise AssertionError("a correction needs logprobs of the trainer and of the engine, and advantages")
    mask_T, segments_T = experience.mask_T, experience.segments_T
    metrics: dict[str, float] = {}
    if config.is_weight.enabled:
        bound = config.is_weight.upper_bound
        weights_T = importance_weights(
            old_T, behaviour_T, mask_T, segments_T, level=config.is_weight.weight_type, upper_bound=bound
        )
        advantages_T = advantages_T * weights_T
        metrics["correction/weight/mean"] = float(weights_T[mask_T].mean())
        metrics["correction/bounded_share"] = float((weights_T[mask_T] >= bound).float().mean())
    kept_T = mask_T
    for each in config.filters:
        if each.enabled:
            band = Band(
                level=each.agg_type,
                ratio=(each.ratio_low, each.ratio_high) if each.ratio_enabled else None,
                difference=(each.diff_low, each.diff_high) if each.diff_enabled else None,
            )
            kept_T = kept_T & inside(band, old_T, behaviour_T, mask_T, segments_T)
    corrected = experience.with_flat(advantages=advantages_T)
    if any(each.enabled for each in config.filters):
        metrics["correction/kept_share"] = float(kept_T[mask_T].float().mean())
        corrected = _masked(corrected, kept_T)
    return corrected, metrics


def _masked(experience: Experience, kept_T: torch.Tensor) -> Experience:
    bounds = np.cumsum([len(sequence) for sequence in experience.sequences])[:-1]
    masks = np.split(kept_T.numpy(), bounds)
    masked = experience.with_rows(loss_mask=masks)
    return masked.keep(torch.tensor([bool(mask.any()) for mask in masks]))
