"""Train strategies on FSDP2: each rank holds a share of every parameter, gradient and moment.

    Root.forward { gather a layer, compute, free it }*  -> TokenOutputs -> loss
    backward     { gather a layer, compute, free it, reduce-scatter its gradient }*  -> clip and AdamW on the shares

Whenever a layer is gathered all ranks must take part. So ranks with fewer microbatches than others make up for it by
idle passes, on two tokens that count for nothing; these come first, so that the last pass is a real one if any is.

Shapes: T flat tokens.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_core.errors import CheckpointError, NonFiniteError, UnsupportedError
from roll_core.modeling.backbone import checkpoint_layers
from roll_core.modeling.context_parallel import ContextParallel
from roll_core.modeling.export import check_exportable, write_model
from roll_core.modeling.model import DTYPES, load_model
from roll_core.modeling.moving import Mover
from roll_core.modeling.portable_state import check_same
from roll_core.modeling.process_group import ProcessGroup
from roll_core.modeling.task_model import TaskModel, finite_loss, plain_metrics
from roll_core.spec.train import (
    LossFn,
    LossMetrics,
    MicroBatch,
    Part,
    PortableState,
    StepStats,
    TokenOutputs,
    TrainStrategy,
    Want,
)
from roll_core.types import DataRank, Totals
from roll_strategy_fsdp2.checkpoint import load_state, save_state
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.loading import fill, open_empty
from roll_strategy_fsdp2.optimizer import ShardedAdamW, like, local
from roll_strategy_fsdp2.plugin import CAPABILITIES
from roll_strategy_fsdp2.portable_state import gather, shapes, take_over
from roll_strategy_fsdp2.sharding import Root, as_fsdp, make_meshes, shard, sharded_modules
from roll_strategy_fsdp2.tensor_parallel import parallelize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.modeling.lora import Adapters
    from roll_core.spec.model import MeshInfo, ModelSpec

OUTPUTS = tuple(each.name for each in fields(TokenOutputs))


class FSDP2Strategy(TrainStrategy):
    """Trains or, without `training`, only scores. Dropout is off."""

    capabilities = CAPABILITIES

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model, keep this rank's share, find out how it computes. Collective."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self._mesh, self.spec = mesh, model
        self.process_group = ProcessGroup(mesh)
        self.mover, self.moves = Mover(mesh.role, self.process_group.device), self.process_group.device.type != "cpu"
        self.meshes = make_meshes(mesh, self._config)
        self.compute_dtype = DTYPES[self._config.param_dtype or model.dtype]
        opened = open_empty(model)
        self.model: PreTrainedModel = opened[0] if opened else load_model(model)
        self.adapters = self._add_adapters(model)
        # What is stepped is float32, begun at the weights as the model's dtype rounds them. Buffers stay as they are.
        held = torch.float32 if self.training is not None else self.compute_dtype
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(held)
        if self.training is not None and model.gradient_checkpointing:
            checkpoint_layers(self.model)
        if self.meshes.tensor is not None:
            parallelize(self.model, self.meshes.tensor)
        self.root: Root = shard(self.model, self.meshes, self._config, self.compute_dtype)
        if opened:
            fill(self.root, opened[1], model, device="cpu" if self._config.offload_policy else mesh.device)
        chunk, context = self._config.logprob_chunk_tokens, self._context()
        with torch.no_grad():
            self.task_model: TaskModel = self.root(
                lambda: TaskModel(self.model, model, chunk_tokens=chunk, context=context)
            )
        self._free()
        self.optimizer: ShardedAdamW | None = None
        if self.training is not None:
            self.optimizer = ShardedAdamW(dict(self.model.named_parameters()), self.training, mesh.device)

    @property
    def data_rank(self) -> DataRank:
        """Ranks that compute a sequence together stand side by side; the first of them leads."""
        together = self.meshes.num_together
        index, place = divmod(self._mesh.rank, together)
        return DataRank(index=index, size=self._mesh.world_size // together, leader=place == 0)

    def _context(self) -> ContextParallel | None:
        if self.meshes.context is None:
            return None
        found = ContextParallel(self.meshes.context.get_group())
        config: Any = self.model.config.get_text_config()
        heads = config.num_attention_heads // self.meshes.tensor_size
        key_heads = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        ) // self.meshes.tensor_size
        found.check_heads(heads, key_heads, "ulysses_size")
        return found

    def _add_adapters(self, model: ModelSpec) -> Adapters | None:
        """And say what has gradients."""
        found: Adapters | None = None
        if model.lora is not None:
            from roll_core.modeling.lora import add_adapters

            found = add_adapters(self.model, model)
        if found is None or self.training is None:
            self.model.requires_grad_(self.training is not None)
        return found

    # -- computing -----------------------------------------------------------------------------------------------------

    def forward(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        """On the mesh's device. Collective: every rank calls it as often as the others."""
        found = self._score(micro, want)
        self._free()
        return found

    def forward_all(self, micros: Sequence[MicroBatch], want: Want) -> Iterator[TokenOutputs]:
        """The idle passes are done at once, the others as they are taken."""
        for idle in self._idle(len(micros)):
            self._score(idle, want)
        return self._score_each(micros, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Raises `NonFiniteError`, which names the sequences, on every rank; what the gradients were is lost then.
        Collective: a rank that finds one makes the passes that the others need, and then tells them."""
        optimizer = self._require_training()
        idle = self._idle(len(micros))
        sharded = as_fsdp(self.root)
        found: list[LossMetrics] = []
        error: NonFiniteError | None = None
        try:
            for at, micro in enumerate((*idle, *micros)):
                last = at == len(idle) + len(micros) - 1
                sharded.set_is_last_backward(last)
                sharded.set_requires_gradient_sync(last or self._config.reduce_scatter_during_grad_accumulation)
                on_device = micro.to(self._mesh.device)
                outputs = self._outputs(on_device, loss.want)
                total = _anchor(outputs)
                if at >= len(idle) and error is None:
                    try:
                        each = finite_loss(loss, outputs, on_device)
                        total = total + each.loss
                        found.append(plain_metrics(each))
                    except NonFiniteError as raised:
                        error = raised
                total.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            sharded.reset_iter_state()
            raise
        try:
            self.process_group.raise_together(error)
        except NonFiniteError:
            optimizer.clear()
            raise
        return found

    def optimizer_step(self) -> StepStats:
        """Collective over the ranks."""
        return self._require_training().step()

    def _outputs(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        """FSDP finds the tensors of a tuple, and does not like views."""

        def compute() -> tuple[Tensor | None, ...]:
            found = _tensors(self.task_model.outputs(micro, want))
            return tuple(each.clone() if each is not None and each._is_view() else each for each in found)

        return TokenOutputs(**dict(zip(OUTPUTS, self.root(compute), strict=True)))

    @torch.no_grad()
    def _score(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        return self._outputs(micro.to(self._mesh.device), want)

    def _score_each(self, micros: Sequence[MicroBatch], want: Want) -> Iterator[TokenOutputs]:
        try:
            for micro in micros:
                yield self._score(micro, want)
        finally:
            self._free()

    def _free(self) -> None:
        """Drop gathered parameters that a forward pass without a backward pass leaves behind: they would be stale."""
        for module in sharded_modules(self.root):
            module.reshard()

    def _idle(self, num_micros: int) -> list[MicroBatch]:
        """As many as the rank with the most microbatches has more than this one."""
        most = torch.tensor([num_micros], device=self._mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [_idle_micro(self._mesh.device)] * (int(most) - num_micros)

    def _require_training(self) -> ShardedAdamW:
        if self.optimizer is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores; it was built without training settings")
        self.mover.need("weights", "grads", "optimizer")
        return self.optimizer

    @property
    def _config(self) -> FSDP2Config:
        if not isinstance(self.config, FSDP2Config):
            raise UnsupportedError(f"the FSDP2 strategies take an FSDP2Config, not a {type(self.config).__name__}")
        return self.config

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the dtype that computes, on every rank, gathered one at a time. Tied weights come once,
        under their first name; adapters are merged in float32."""
        if self.adapters is None:
            for name, parameter in self.model.named_parameters():
                yield name, self._whole(parameter, self.compute_dtype)
            return
        for name, tensor in self.adapters.merged(self._whole_to_merge):
            yield name, tensor.to(self.compute_dtype)

    def export_model(self, path: Path) -> None:
        """Gathered tensor by tensor and written by rank 0, which holds what it writes on its host meanwhile: the whole
        model, or the adapters alone where `lora_export` says so."""
        check_exportable(self.model, self.spec)
        adapters, leader = self.adapters, self._mesh.rank == 0
        if adapters is not None and adapters.lora.export == "adapter":
            gathered = ((name, self._whole(each, torch.float32)) for name, each in adapters.trained().items())
            state = {name: whole.cpu() for name, whole in gathered if leader}
            if leader:
                adapters.export(path, state)
        else:
            state = {name: whole.cpu() for name, whole in self.export_weights() if leader}
            if leader:
                write_model(self.model, self.spec, state | self._tied(state) | self._buffers(), path)
        dist.barrier()

    @torch.no_grad()
    def _whole(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded before it travels, and gathered on the device even where the shares lie on the host."""
        share = local(parameter).to(self._mesh.device, dtype)
        return like(parameter, share).full_tensor()

    def _whole_to_merge(self, parameter: Tensor) -> Tensor:
        """Adapters as they are stepped, the model beneath as it computes."""
        return self._whole(parameter, torch.float32 if parameter.requires_grad else self.compute_dtype)

    def _tied(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Further names of exported tensors."""
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(each), name) for name, each in every}
        return {name: state[other] for name, other in names.items() if name != other and other in state}

    def _buffers(self) -> dict[str, Tensor]:
        """Those that transformers stores."""
        persistent = self.model.state_dict().keys()
        return {name: each.cpu() for name, each in self.model.named_buffers() if name in persistent}

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> Callable[[], None] | None:
        """Into rank 0's directory, see `checkpoint`. Of a model with adapters only what is trained is written, and what
        identifies the rest. With `async_save_ckpt` the shares are copied, and left to be written. Collective."""
        said: dict[str, Any] = {"step_count": self.optimizer.step_count if self.optimizer is not None else 0}
        if self.adapters is not None:
            said["adapters"] = self._identity()
        return save_state(path, self._state(), said, later=self._config.async_save_ckpt)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """From rank 0's directory, whatever the number of ranks was. Collective."""
        here = self._identity()
        said = load_state(path, self._state(), lambda said: self._refuse_other(said.get("adapters"), here, path))
        if self.optimizer is not None:
            self.optimizer.restored(int(said["step_count"]))

    def export_state(self) -> PortableState:
        """Gathered parameter by parameter, on every rank. Collective."""
        optimizer = self._require_training()
        return PortableState(
            step_count=optimizer.step_count,
            shapes=shapes(optimizer),
            read=lambda name: gather(optimizer, name, self._mesh.device),
            adapters=self._identity(),
        )

    def import_state(self, state: PortableState) -> None:
        """Each rank reads all of it, a parameter at a time, and keeps its share. Collective."""
        optimizer = self._require_training()
        check_same(state, shapes(optimizer), adapters=self.adapters, identity=self._identity())
        take_over(optimizer, state)

    def _identity(self) -> dict[str, Any] | None:
        return None if self.adapters is None else self.adapters.identity(self._whole_to_merge)

    def _refuse_other(self, saved: dict[str, Any] | None, here: dict[str, Any] | None, path: Path) -> None:
        if self.adapters is not None and here is not None:
            self.adapters.refuse_other(saved, here, path)
        elif saved is not None:
            raise CheckpointError(f"{path}: holds adapters, but this role trains the whole model (lora_target)")

    def _state(self) -> dict[str, Tensor]:
        self.mover.need("weights", "grads", "optimizer")
        kept = dict(self.model.named_parameters()) if self.adapters is None else self.adapters.trained()
        weights: dict[str, Tensor] = {f"weight.{name}": like(each, local(each)) for name, each in kept.items()}
        return weights | self.optimizer.tensors() if self.optimizer is not None else weights

    # -- the rest ------------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[Part]) -> None:
        """The memory of this rank's shares; where that is the host's already (`offload_policy`) it stays."""
        if not self.moves:
            return
        for part in parts:
            self.mover.away(part, self._held()[part])

    def onload(self, parts: Sequence[Part]) -> None:
        """Into the same tensors."""
        for part in parts:
            self.mover.back(part)

    def memory(self) -> Mapping[str, int]:
        """Measured on this rank's shares; 0 for what is moved away."""
        held = {part: sum(each.nbytes for each in tensors) for part, tensors in self._held().items()}
        return {part: 0 if self.mover.is_away(part) else size for part, size in held.items()}

    def _held(self) -> dict[Part, list[Tensor]]:
        weights = [local(each) for each in self.model.parameters()]
        if self.optimizer is None:
            return {"weights": weights, "grads": [], "optimizer": []}
        return {"weights": weights, "grads": self.optimizer.gradients(), "optimizer": self.optimizer.states()}

    def close(self) -> None:
        """Leave the process group and drop the optimizer's state."""
        self.optimizer = None
        if hasattr(self, "process_group"):
            self.process_group.close()


def _tensors(outputs: TokenOutputs) -> tuple[Tensor | None, ...]:
    return tuple(getattr(outputs, name) for name in OUTPUTS)


def _anchor(outputs: TokenOutputs) -> Tensor:
    """0, with a backward pass through the whole model and no number in it: a rank whose loss reads nothing takes part
    in the others' reduction."""
    tensors = [each for each in _tensors(outputs) if each is not None and each.requires_grad]
    return torch.stack([each[:0].sum() for each in tensors]).sum()


def _idle_micro(device: str) -> MicroBatch:
    ids_T = torch.zeros(2, dtype=torch.int64, device=device)
    return MicroBatch(
        ids=("idle",),
        tokens_T=ids_T,
        positions_T=torch.arange(2, device=device),
        segments_T=ids_T,
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32, device=device),
        lengths=(2,),
        loss_mask_T=torch.tensor([False, True], device=device),
        groups_S=ids_T[:1],
        totals=Totals(tokens=1, sequences=1, groups=1, max_length=1),
    )
