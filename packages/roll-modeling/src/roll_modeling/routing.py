"""Expert routing of transformers' mixtures of experts: recorded during generation, replayed in training.

Engine and trainer round differently. For tokens near a routing boundary their routers therefore choose different
experts, and the logprobs differ by far more than rounding. Rollout routing replay (R3, arXiv:2510.11370) uses the
engine's experts in training. The indices come from the engine. The weights come from the router's current logits at
these indices, so the gradient flows through the logits as usual.

A router of transformers returns its logits, the weights of the chosen experts and their indices. A forward hook records
or replaces them. Activation checkpointing runs the hook again in the backward pass.

N tokens of one call, in the order in which the router receives them    M layers with experts    K top-k    E experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import DataError, ModelError, UnsupportedError
from roll_modeling.model_table import NUMBER_OF_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from roll_core.types import RoutedExperts

    Weights = Callable[[Any, Tensor, Tensor], Tensor]
    """Maps a router, its logits `[N, E]` and indices `[N, K]` to the weights of these experts, `[N, K]`."""


def _softmax_weights(router: Any, logits_NE: Tensor, indices_NK: Tensor) -> Tensor:
    chosen_NK = logits_NE.float().softmax(-1).gather(1, indices_NK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such attribute and always normalises
        chosen_NK = chosen_NK / chosen_NK.sum(dim=-1, keepdim=True)
    return chosen_NK


def _sigmoid_weights(router: Any, logits_NE: Tensor, indices_NK: Tensor) -> Tensor:
    chosen_NK = logits_NE.sigmoid().gather(1, indices_NK)
    if router.norm_topk_prob:
        chosen_NK = chosen_NK / (chosen_NK.sum(dim=-1, keepdim=True) + 1e-20)
    scaled_NK: Tensor = chosen_NK * router.routed_scaling_factor
    return scaled_NK


def _softmax_scores(logits_NE: Tensor) -> Tensor:
    return logits_NE.float().softmax(-1)


def _sigmoid_scores(logits_NE: Tensor) -> Tensor:
    scores_NE = logits_NE.float().sigmoid()
    return scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + 1e-20)


@dataclass(frozen=True, slots=True)
class RouterFormulas:
    """Formulas of an architecture's routers."""

    weights: Weights
    """Weights of given experts."""
    scores: Callable[[Tensor], Tensor]
    """Maps logits `[N, E]` to scores in float32, which add up to 1 over the experts."""


SOFTMAX, SIGMOID = RouterFormulas(_softmax_weights, _softmax_scores), RouterFormulas(_sigmoid_weights, _sigmoid_scores)
ROUTERS: Mapping[str, RouterFormulas] = {
    "qwen2_moe": SOFTMAX,
    "qwen3_moe": SOFTMAX,
    "olmoe": SOFTMAX,
    "mixtral": SOFTMAX,
    "deepseek_v3": SIGMOID,
    "glm4_moe": SIGMOID,
}
"""Formulas of each architecture's routers (`model_type`)."""


def check_routers(keys: Mapping[str, Any], key: str) -> None:
    """Raise `ValueError` for a model whose routers the config `key` does not support. `keys`: see
    `StrategyConfig.check_model`."""
    if "model_type" in keys and (why := _unknown(str(keys["model_type"]))):
        raise ValueError(f"{key} {why}")


def _compact(indices: np.ndarray[Any, Any], experts: int) -> RoutedExperts:
    """Cast indices to the smallest unsigned integer type for this number of experts."""
    return indices.astype(np.min_scalar_type(max(experts - 1, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLayout:
    """Layers and experts of one mixture-of-experts model, for engines that return rows for all of its layers."""

    num_layers: int
    layers: tuple[int, ...]
    """Indices of the layers that have experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, config: Any) -> RoutingLayout:
        """Expert layout from a transformers config. Raises `UnsupportedError` if the model has no experts."""
        experts = next((count for name in NUMBER_OF_EXPERTS if (count := getattr(config, name, None))), 0)
        dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", None) or 1
        first = getattr(config, "first_k_dense_replace", None) or 0
        every = range(config.num_hidden_layers)
        layers = tuple(part for part in every if part >= first and part not in dense and (part + 1) % step == 0)
        if not experts or not layers:
            raise UnsupportedError(f"router_replay needs experts, and this {config.model_type} has none")
        return cls(num_layers=len(every), layers=layers, top_k=config.num_experts_per_tok, num_experts=experts)

    def routed_experts(self, indices: np.ndarray[Any, Any]) -> RoutedExperts:
        """Rows `[tokens, M, K]` of the layers with experts from rows of all layers, `[tokens, num_layers, K]`."""
        return _compact(indices[:, list(self.layers)], self.num_experts)


def _unknown(model_type: str) -> str:
    if model_type in ROUTERS:
        return ""
    known = ", ".join(sorted(ROUTERS))
    return f"supports only the routers of {known}, and the model has type {model_type}"


class Routers:
    """Routers of a model in the order of its layers, with the formulas of its architecture."""

    def __init__(self, model: Any, key: str) -> None:
        """Raises `UnsupportedError`, naming the config `key` that needs them, for unknown routers."""
        config = model.config.get_text_config()
        if why := _unknown(config.model_type):
            raise UnsupportedError(f"{key} {why}")
        self.formulas = ROUTERS[config.model_type]
        self.modules: list[Any] = [
            module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
        ]
        if not self.modules:
            raise UnsupportedError(f"{key} needs experts; no layer of this {config.model_type} has any")
        self.top_k, self.num_experts = int(self.modules[0].top_k), int(self.modules[0].num_experts)
        self.dtype = np.min_scalar_type(self.num_experts - 1)

    def hook(self, act: Callable[[int, Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]) -> None:
        """Call `act(layer, router, logits, weights, indices)` after each call of a router.

        If it returns weights and indices, they replace the router's own.
        """
        for layer, module in enumerate(self.modules):

            def after(module: Any, _: Any, output: Any, layer: int = layer) -> Any:
                logits_NE, weights_NK, indices_NK = output
                changed = act(layer, module, logits_NE, weights_NK, indices_NK)
                return None if changed is None else (logits_NE, *changed)

            module.register_forward_hook(after)


class RoutingRecorder:
    """Records the experts chosen by a model's routers, from one `take` to the next."""

    def __init__(self, model: nn.Module) -> None:
        """Attach to the routers of `model`. Raises `UnsupportedError`, naming the architecture, for unknown routers."""
        self._routers = Routers(model, "router_replay")
        self._found: list[Tensor] = []
        self._routers.hook(self._note)

    def take(self) -> RoutedExperts:
        """Expert indices of the one forward pass since the last call, `[N, M, K]`.

        Raises `ModelError` if a forward pass did not call every router exactly once.
        """
        import torch

        taken, self._found = self._found, []
        if len(taken) != len(self._routers.modules):
            raise ModelError(
                f"{len(taken)} routers were called in one forward pass, the model has {len(self._routers.modules)}"
            )
        return _compact(torch.stack(taken, dim=1).cpu().numpy(), self._routers.num_experts)

    def _note(self, layer: int, router: Any, logits_NE: Tensor, weights_NK: Tensor, indices_NK: Tensor) -> None:
        if layer == 0:
            self._found = []  # drop the records of an unused or failed forward pass
        self._found.append(indices_NK.detach())


class RoutingReplay:
    """Routes tokens to given experts, one microbatch at a time.

    A microbatch lasts from one `begin` to the next, including its backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach to the routers of `model`. Raises `UnsupportedError`, naming the architecture, for unknown routers."""
        self._routers = Routers(model, "router_replay")
        self._given_MNK: Tensor | None = None
        self._differing_N: Tensor | None = None
        self._counted = 0
        self._tried = False
        self._routers.hook(self._replace)

    def begin(self, routed_NMK: Tensor | None) -> None:
        """Replay these experts in the following forward passes, in the order in which the routers receive tokens.

        -1 leaves one choice to the router; None disables replay. Raises `DataError` if the indices do not fit the
        model.
        """
        import torch

        self._given_MNK, self._differing_N, self._counted = None, None, 0
        if routed_NMK is None:
            return
        routers = self._routers
        shape = (len(routers.modules), routers.top_k)
        if tuple(routed_NMK.shape[1:]) != shape:
            raise DataError(
                f"the engine chose {routed_NMK.shape[2]} experts in each of {routed_NMK.shape[1]} layers, this model"
                f" {shape[1]} in each of {shape[0]}: it serves another model, or counts other layers"
            )
        if len(routed_NMK) and int(routed_NMK.max()) >= routers.num_experts:
            raise DataError(f"the engine chose expert {int(routed_NMK.max())}, this model has {routers.num_experts}")
        self._given_MNK = routed_NMK.to(torch.int64).transpose(0, 1).contiguous()
        self._differing_N = torch.zeros(len(routed_NMK), device=routed_NMK.device)

    @property
    def disagreement_N(self) -> Tensor | None:
        """Per token, the share of replayed experts (over M and K) that the routers would not have chosen.

        Measured in the first forward pass since `begin`. None if nothing is replayed.
        """
        return self._differing_N

    def _replace(
        self, layer: int, router: Any, logits_NE: Tensor, weights_NK: Tensor, indices_NK: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        if not self._tried:  # in the first forward pass: only there is the weight of a sharded router whole
            self._try(router, logits_NE, weights_NK, indices_NK)
        if self._given_MNK is None or self._differing_N is None:
            return None
        given_NK = self._given_MNK[layer]
        if len(given_NK) != len(indices_NK):
            raise ModelError(
                f"experts are given for {len(given_NK)} tokens, a router was called with {len(indices_NK)}"
            )
        known_NK = given_NK >= 0
        if self._counted == layer:  # skips recomputed layers
            own_NKK = given_NK.unsqueeze(2) == indices_NK.unsqueeze(1)
            missed_NK = known_NK & ~own_NKK.any(-1)
            self._differing_N += missed_NK.float().mean(-1) / len(self._routers.modules)
            self._counted += 1
        replayed_NK = given_NK.where(known_NK, indices_NK)
        weights = self._routers.formulas.weights(router, logits_NE, replayed_NK)
        return weights.to(weights_NK.dtype), replayed_NK

    def _try(self, router: Any, logits_NE: Tensor, weights_NK: Tensor, indices_NK: Tensor) -> None:
        """Check that the formula reproduces the router's own weights. Raises `UnsupportedError` otherwise."""
        import torch

        with torch.no_grad():
            found_NK = self._routers.formulas.weights(router, logits_NE, indices_NK).to(weights_NK.dtype)
        tolerance = 1e-4 if logits_NE.dtype == torch.float32 else 5e-2
        if not torch.allclose(found_NK, weights_NK, rtol=tolerance, atol=1e-6):
            raise UnsupportedError(
                f"router_replay is not supported: {type(router).__name__} of the installed transformers computes"
                " other weights of experts than this version of ROLL"
            )
        self._tried = True
