"""The embedded train strategy: Hugging Face models, whole on every rank, one process per replica.

    MicroBatch -> backbone (flat, or padded inside) -> hidden states -> head, chunk by chunk -> TokenOutputs
                                                                                                   |
       all-reduce, clip, AdamW <- flat float32 gradients <- backward <----------------------- loss <-+

Shapes: T flat tokens, S sequences, N tokens that have something before them, H hidden size, K top-k.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import torch

from roll_core.builtin.hf.config import HFTrainConfig
from roll_core.builtin.hf.optimizer import AdamW
from roll_core.builtin.hf.replicas import Replicas
from roll_core.errors import CheckpointError, NonFiniteError, RollError, UnsupportedError
from roll_core.modeling.backbone import Backbone, LanguageHead, checkpoint_layers
from roll_core.modeling.fused import fuse
from roll_core.modeling.layout import make_adjacent
from roll_core.modeling.logprobs import HeadRequest
from roll_core.modeling.model import load_model, load_tokenizer, quiet, scalar_head
from roll_core.spec.providers import TrainCapabilities
from roll_core.spec.train import LossFn, LossMetrics, MicroBatch, StepStats, TokenOutputs, TrainStrategy, Want

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo, ModelSpec

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the saved state."""


class HFTrainStrategy(TrainStrategy):
    """Trains or, without `training`, only scores.

    Dropout is off: the logprobs before an update and those inside it must come from the same function.
    """

    capabilities = TrainCapabilities(
        tasks=("causal_lm", "value", "reward"),
        packing=True,
        gradient_checkpointing=True,
        data_parallel=True,
        topk=True,
        weight_transports=("shared", "shm", "collective"),
    )

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model, find out how it computes, lay out gradients."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self._mesh, self.spec = mesh, model
        self.replicas = Replicas(mesh)
        self.model: PreTrainedModel = load_model(model, device=mesh.device)
        make_adjacent(self.model)
        if self._config.fused:
            log.info("%s: %d modules fused", mesh.role, fuse(self.model))
        self.model.requires_grad_(self.training is not None)
        self.replicas.broadcast(self.model.parameters())
        self.backbone = Backbone(self.model, attn_implementation=model.attn_implementation)
        self.head = LanguageHead(self.model) if model.task == "causal_lm" else None
        self.optimizer: AdamW | None = None
        if self.training is not None:
            if model.gradient_checkpointing:
                checkpoint_layers(self.model)
            self.optimizer = AdamW(dict(self.model.named_parameters()), self.training, self.replicas)

    # -- computing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        """On the mesh's device."""
        return self._outputs(micro.to(self._mesh.device), want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Raises `NonFiniteError`, which names the sequences, before a NaN gets into the gradients."""
        if self.optimizer is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores; it was built without training settings")
        return [self._one_backward(micro.to(self._mesh.device), loss) for micro in micros]

    def optimizer_step(self) -> StepStats:
        """Collective over the ranks."""
        if self.optimizer is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores; it was built without training settings")
        return self.optimizer.step()

    def _one_backward(self, micro: MicroBatch, loss: LossFn) -> LossMetrics:
        outputs = self._outputs(micro, loss.want)
        found = loss(outputs, micro)
        if not torch.isfinite(found.loss.detach()).all():
            raise NonFiniteError(_where_not_finite(found.loss.detach(), outputs, micro))
        if found.loss.requires_grad:
            found.loss.backward()  # type: ignore[no-untyped-call]
        return {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in found.metrics.items()
        }

    def _outputs(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        hidden_TH = self.backbone.hidden(micro.tokens_T, micro.positions_T, micro.lengths)
        values_T = self._values(hidden_TH, micro) if want.values else None
        if not (want.logprobs or want.entropy or want.topk):
            return TokenOutputs(values_T=values_T)
        if self.head is None:
            raise UnsupportedError(f"a model of task {self.spec.task} has no logprobs")
        # Token t is predicted from the hidden state at t - 1. A sequence's first token is predicted from nothing.
        wanted_T = micro.positions_T > 0
        if want.masked_only:
            wanted_T = wanted_T & micro.loss_mask_T
        places_N = wanted_T.nonzero()[:, 0]
        request = HeadRequest(
            temperature=want.temperature,
            entropy=want.entropy,
            entropy_grad=want.entropy_grad,
            topk=want.topk,
            chunk_tokens=self._config.logprob_chunk_tokens,
        )
        found = self.head.outputs(hidden_TH.index_select(0, places_N - 1), micro.tokens_T[places_N], request)

        def spread(rows_N: Tensor | None) -> Tensor | None:
            if rows_N is None:
                return None
            return rows_N.new_zeros(micro.num_tokens, *rows_N.shape[1:]).index_copy(0, places_N, rows_N)

        return TokenOutputs(
            logprobs_T=spread(found.logprobs_N) if want.logprobs else None,
            entropy_T=spread(found.entropy_N),
            values_T=values_T,
            topk_logprobs_TK=spread(found.topk_logprobs_NK),
            topk_ids_TK=spread(found.topk_ids_NK),
        )

    def _values(self, hidden_TH: Tensor, micro: MicroBatch) -> Tensor:
        """Of the state before each token (`value`), or of the sequence up to and with it (`reward`)."""
        if self.spec.task == "causal_lm":
            raise UnsupportedError("a causal language model has no values; the role needs task value or reward")
        values_T: Tensor = scalar_head(self.model)(hidden_TH)[:, 0].float()
        if self.spec.task == "reward":
            return values_T
        before_T = torch.cat([values_T.new_zeros(1), values_T[:-1]])
        return torch.where(micro.positions_T > 0, before_T, 0.0)

    @property
    def _config(self) -> HFTrainConfig:
        if not isinstance(self.config, HFTrainConfig):
            raise UnsupportedError(f"hf_train takes an HFTrainConfig, not a {type(self.config).__name__}")
        return self.config

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live parameters. Tied weights come once, under their first name."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def export_model(self, path: Path) -> None:
        """Written by rank 0."""
        if self.replicas.rank == 0:
            if self.spec.task != "causal_lm" and not hasattr(self.model, "score"):
                raise UnsupportedError(
                    f"transformers has no scoring form of {type(self.model).__name__}, so it cannot be exported"
                )
            # Copies, because parameters may lie side by side in one buffer; tied ones are the same tensor twice.
            copies: dict[int, Tensor] = {}
            state = {
                name: copies.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), tensor.detach().clone())
                for name, tensor in self.model.state_dict().items()
            }
            config = self.model.config
            usual, config._attn_implementation = config._attn_implementation, None
            try:
                with quiet():
                    self.model.save_pretrained(path, state_dict=state)
            finally:
                config._attn_implementation = usual
            if self.spec.tokenizer or self.spec.path:
                load_tokenizer(self.spec).save_pretrained(path)
        self.replicas.wait()

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Weights and optimizer are written by rank 0, since all ranks hold the same."""
        from safetensors.torch import save_file

        state: dict[str, Any] = {"format": FORMAT, "world_size": self.replicas.size}
        if self.replicas.rank == 0:
            save_file({name: each.contiguous() for name, each in self.export_weights()}, path / "weights.safetensors")
            if self.optimizer is not None:
                tensors = self.optimizer.tensors()
                save_file({name: each.contiguous() for name, each in tensors.items()}, path / "optimizer.safetensors")
                state["step_count"] = self.optimizer.step_count
        save_file({"torch_cpu": torch.get_rng_state()}, path / "random.safetensors")
        (path / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        self.replicas.wait()

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Rank 0 reads and tells the others, so the number of ranks may differ from when it was saved."""
        from safetensors.torch import load_file

        step_count = torch.zeros(1, dtype=torch.int64)
        if self.replicas.rank == 0:
            try:
                state = json.loads((path / "state.json").read_text(encoding="utf-8"))
                if state.get("format") != FORMAT:
                    raise CheckpointError(f"{path}: format {state.get('format')}; this version reads {FORMAT}")
                _restore(dict(self.export_weights()), path / "weights.safetensors")
                if self.optimizer is not None:
                    _restore(self.optimizer.tensors(), path / "optimizer.safetensors")
                    step_count[0] = state["step_count"]
            except (OSError, KeyError, ValueError) as error:
                if isinstance(error, RollError):
                    raise
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.replicas.broadcast([step_count, *(tensor for _, tensor in self.export_weights())])
        if self.optimizer is not None:
            self.replicas.broadcast(self.optimizer.tensors().values())
            self.optimizer.restored(int(step_count))
        if (path / "random.safetensors").is_file():
            torch.set_rng_state(load_file(path / "random.safetensors")["torch_cpu"])

    # -- the rest ------------------------------------------------------------------------------------------------------

    def memory(self) -> Mapping[str, int]:
        """Measured on the tensors."""
        held = {"weights": sum(each.nbytes for each in self.model.parameters())}
        return held | self.optimizer.memory() if self.optimizer is not None else held

    def close(self) -> None:
        """Leave the process group and drop the optimizer's state."""
        if hasattr(self, "replicas"):
            self.replicas.close()
        self.optimizer = None


def _restore(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Overwrite `tensors` in place with those of the file, which must be the same ones."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            if names != set(tensors):
                odd = min(names ^ set(tensors))
                raise CheckpointError(f"{file}: tensor {odd} is in only one of the checkpoint and the model")
            for name, tensor in tensors.items():
                found = stored.get_tensor(name)
                if found.shape != tensor.shape or found.dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{file}: {name} is {found.dtype} {tuple(found.shape)}, the model has {tensor.dtype}"
                        f" {tuple(tensor.shape)}"
                    )
                tensor.copy_(found)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _where_not_finite(loss: Tensor, outputs: TokenOutputs, micro: MicroBatch) -> str:
    """The sequences in which an output is not finite; all of the microbatch's if none is."""
    bad_T = torch.zeros_like(micro.loss_mask_T)
    for tensor in (outputs.logprobs_T, outputs.entropy_T, outputs.values_T):
        if tensor is not None:
            bad_T |= ~torch.isfinite(tensor.detach())
    rows = sorted(set(micro.segments_T[bad_T].tolist()))
    if rows:
        return f"the loss is {float(loss)}: outputs are not finite in sequences {', '.join(micro.ids[i] for i in rows)}"
    return (
        f"the loss is {float(loss)} although every output is finite; it came from the sequences {', '.join(micro.ids)}"
    )
