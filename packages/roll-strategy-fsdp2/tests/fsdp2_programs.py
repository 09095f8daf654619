"""What ranks do in the tests: `function(rank, job, ...)`, run by `roll_testing.ranks.RankHost`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import count_totals, pack
from roll_core.spec.model import LoraSpec, MeshInfo, ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import ParameterState, PortableState, TrainingSpec, TrainStrategy, WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling import blocks
from roll_modeling.optimizer import clip_factor, create_optimizer
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.strategy import FSDP2Strategy
from roll_testing.bench import Case, share
from roll_testing.kit import registry
from roll_testing.losses import TRAINING as KIT_TRAINING
from roll_testing.losses import SpoiltLoss
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.programs import Raised, raised

PRELOAD = (
    "fsdp2_programs",
    "packaging.requirements",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.optimization",
    "roll_modeling.model_table",
    "roll_modeling.lora",
    "peft",
    "roll_strategy_fsdp2.config",
    "roll_strategy_fsdp2.strategy",
)
"""What ranks import, once for all."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables of all ranks: one thread each, and an allocator that returns freed memory at once, to be measured."""
LENGTHS = (5, 1, 9, 3, 12, 2, 7)
TINY = {**QWEN3, "vocab_size": 61}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MIXTURES = {
    "2, checkpointed": (2, {}, {"gradient_checkpointing": True}),
    "padded": (2, {}, {"attn_implementation": "sdpa"}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}, {}),
    "experts 2": (2, {"ep_size": 2}, {}),
    "ulysses 2": (2, {"ulysses_size": 2}, {}),
    "ring 2, two copies": (4, {"ring_size": 2, "fsdp_size": 2}, {}),
}
"""Number of ranks, `strategy_config` and changes of the model for tests of `MOE`."""
LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=12.0)
TRAINING = TrainingSpec(
    learning_rate=1e-2,
    weight_decay=0.1,
    # So large that an entry whose gradient is nothing but rounding (a key's bias) does not move as far as any other.
    adam_epsilon=1e-4,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    num_steps=8,
    max_grad_norm=0.5,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A strategy on some ranks."""

    world_size: int = 1
    port: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingSpec | None = TRAINING
    max_sequences: int = 2

    def with_(self, **changes: Any) -> Job:
        return replace(self, **changes)


def mixture_case(folder: Path, name: str, **config: Any) -> Case:
    """The case of `MIXTURES`, with more keys of `strategy_config`."""
    num_ranks, split, changes = MIXTURES[name]
    architecture = {key: value for key, value in MOE.items() if key != "vocab_size"}
    model = write_checkpoint(folder, architecture, task="causal_lm", vocab_size=MOE["vocab_size"])
    return Case(
        provider=registry().find(TrainProvider, "fsdp2_train"),
        strategy_config=split | config,
        model=replace(model, **changes),
        training=KIT_TRAINING,
        world_size=num_ranks,
        devices=("cpu",) * num_ranks,
    )


def sequences() -> list[TrainSequence]:
    """Ragged, one of length 1, one without a token in the loss."""
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            id=f"s{i}",
            tokens=rng.integers(0, TINY["vocab_size"], length),
            loss_mask=np.arange(length) >= (length if i == 3 else max(1, min(2, length - 1))),
            returns=rng.normal(size=length).astype(np.float32),
            group=i // 2,
        )
        for i, length in enumerate(LENGTHS)
    ]


def model_spec(job: Job) -> ModelSpec:
    spec = dict(job.model)
    if "path" not in spec:
        spec.setdefault("random_init", TINY)
    spec.setdefault("seed", 3)
    return ModelSpec(**spec)


@contextmanager
def built(rank: int, job: Job):
    """The strategy of this rank, closed at the end."""
    torch.set_num_threads(1)
    blocks.BACKEND = "eager"  # traces and guards are the same, and nothing is compiled
    strategy = FSDP2Strategy(FSDP2Config.model_validate(job.config), job.training)
    mesh = MeshInfo(
        role="student", rank=rank, world_size=job.world_size, master_port=job.port, num_threads=1, timeout_s=40
    )
    try:
        strategy.build(model_spec(job), mesh)
        yield strategy
    finally:
        strategy.close()


def objective(job: Job):
    return sft_objective() if job.model.get("task", "causal_lm") == "causal_lm" else ValueObjective()


def micros(strategy: TrainStrategy, job: Job, batch: list[TrainSequence]):
    return pack(share(strategy, batch), totals=count_totals(batch), max_sequences=job.max_sequences)


def weights(strategy: TrainStrategy) -> dict[str, np.ndarray]:
    return {name: each.float().cpu().numpy().copy() for name, each in strategy.export_weights()}


def adapters_alone(strategy: TrainStrategy, job: Job) -> dict[str, np.ndarray]:
    lora = job.model.get("lora")
    alone = strategy.export_adapters() if lora == LORA else ()
    return {name: each.float().cpu().numpy().copy() for name, each in alone}


def ask_for_adapters(rank: int, job: Job) -> Raised | None:
    """What that raises."""
    with built(rank, job) as strategy:
        return raised(strategy.export_adapters)


def step(strategy: TrainStrategy, job: Job, batch: list[TrainSequence]):
    found = strategy.forward_backward(micros(strategy, job, batch), objective(job))
    return sum(each["loss"] for each in found), asdict(strategy.optimizer_step())


def train(rank: int, job: Job, num_steps: int = 3) -> dict[str, Any]:
    """Steps on the batch, with a scoring pass before and after."""
    with built(rank, job) as strategy:
        before = weights(strategy)
        first = scored(strategy, job)
        steps = [step(strategy, job, sequences()) for _ in range(num_steps)]
        return {
            "leads": strategy.data_rank.leader,
            "before": before,
            "scored_before": first,
            "steps": steps,
            "weights": weights(strategy),
            "alone": adapters_alone(strategy, job),
            "scored": scored(strategy, job),
            "base": scored(strategy, job, base=True) if "lora" in job.model else {},
            "memory": dict(strategy.memory()),
        }


def shards_beside_whole_matrices(rank: int, job: Job) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Parameters before and after steps, and after steps of the same optimizer on whole tensors and gradients."""
    with built(rank, job) as strategy:
        parameters = strategy.optimizer.parameters
        whole = {name: each.detach().full_tensor().clone().requires_grad_() for name, each in parameters.items()}
        before = {name: each.detach().numpy().copy() for name, each in whole.items()}
        optimizer = create_optimizer(whole, job.training)
        for _ in range(3):
            strategy.forward_backward(micros(strategy, job, sequences()), objective(job))
            for name, each in parameters.items():
                whole[name].grad = each.grad.full_tensor().clone()
            stats = strategy.optimizer_step()
            for group in optimizer.param_groups:
                group["lr"] = stats.learning_rate
            for each in whole.values():
                each.grad.mul_(clip_factor(stats.grad_norm, job.training.max_grad_norm))
            optimizer.step()
        after = {name: each.detach().full_tensor().numpy().copy() for name, each in parameters.items()}
        return {name: (before[name], after[name], each.detach().numpy()) for name, each in whole.items()}


def scored(strategy: TrainStrategy, job: Job, base: bool = False) -> dict[str, np.ndarray]:
    """By sequence, of this rank's share."""
    is_lm = job.model.get("task", "causal_lm") == "causal_lm"
    want = (
        WantedOutputs(logprobs=True, entropy=True, topk=3, base=base)
        if is_lm
        else WantedOutputs(values=True, base=base)
    )
    found: dict[str, np.ndarray] = {}
    mine = micros(strategy, job, sequences())
    for micro, outputs in zip(mine, strategy.forward_all(mine, want), strict=True):
        each = torch.stack([outputs.logprobs_T, outputs.entropy_T], 1) if is_lm else outputs.values_T[:, None]
        if is_lm:
            each = torch.cat([each, outputs.topk_logprobs_TK, outputs.topk_ids_TK.float()], 1)
        for at, name in enumerate(micro.ids):
            found[name] = each[int(micro.cu_seqlens[at]) : int(micro.cu_seqlens[at + 1])].float().numpy().copy()
    return found


def skip_and_go_on(rank: int, job: Job) -> tuple[dict[str, Any], ...]:
    """A step whose gradient rank 1 spoils, then a good one; and the good one alone."""
    found = []
    for spoil in (True, False):
        with built(rank, job) as strategy:
            steps = []
            if spoil:
                strategy.forward_backward(micros(strategy, job, sequences()), objective(job))
                if rank == 1:
                    next(strategy.model.parameters()).grad._local_tensor[0] = torch.inf
                steps.append(asdict(strategy.optimizer_step()))
            steps.append(step(strategy, job, sequences())[1])
            found.append({"steps": steps, "weights": weights(strategy)})
            port = strategy._mesh.master_port
        job = job.with_(port=port + 1)
    return tuple(found)


def lose_and_go_on(rank: int, job: Job, sequence: str) -> tuple[Raised | None, dict[str, Any], dict[str, Any]]:
    """What a step raises whose loss is NaN for one sequence, then a good step; and the good one alone."""
    found = []
    for spoil in (True, False):
        with built(rank, job) as strategy:
            batch = micros(strategy, job, sequences())
            if spoil:
                strategy.forward_backward(batch, objective(job))
                error = raised(lambda: strategy.forward_backward(batch, SpoiltLoss(sequence=sequence)))  # noqa: B023
            found.append({"step": step(strategy, job, sequences())[1], "weights": weights(strategy)})
            port = strategy._mesh.master_port
        job = job.with_(port=port + 1)
    return error, found[0], found[1]


def refused_while_offloaded(strategy: FSDP2Strategy, job: Job) -> list[Raised | None]:
    """What each call raises that needs something on the device."""
    batch, want = micros(strategy, job, sequences()), WantedOutputs(logprobs=True)
    return [
        raised(strategy.optimizer_step),
        raised(lambda: strategy.forward(batch[0], want)),
        raised(lambda: list(strategy.forward_all(batch, want))),
        raised(lambda: list(strategy.export_weights())),
    ]


def away_and_back(
    rank: int, job: Job
) -> tuple[list[dict[str, int]], list[Raised | None], dict[str, Any], dict[str, Any]]:
    """Steps around which the shares' memory is moved, as if the device were not the host, and in which nothing is."""
    found = []
    for moves in (True, False):
        with built(rank, job) as strategy:
            strategy.moves = moves
            step(strategy, job, sequences())
            strategy.forward_backward(micros(strategy, job, sequences()), objective(job))
            if moves:
                held = [dict(strategy.memory())]
                strategy.offload(("weights", "grads", "optimizer"))
                held.append(dict(strategy.memory()))
                storages = [
                    each.untyped_storage().nbytes() for tensors in strategy.part_tensors().values() for each in tensors
                ]
                errors = refused_while_offloaded(strategy, job)
                strategy.onload(("grads", "optimizer", "weights"))
                held.append(dict(strategy.memory()))
                # The numbers of steps are no device's.
                assert sum(storages) <= 4 * len(storages)
            steps = [asdict(strategy.optimizer_step()), step(strategy, job, sequences())[1]]
            found.append({"steps": steps, "weights": weights(strategy)})
            port = strategy._mesh.master_port
        job = job.with_(port=port + 1)
    return held, errors, found[0], found[1]


def portable(rank: int, job: Job) -> dict[str, np.ndarray]:
    """After two steps, the state that all strategies read; and that reading it into another changes nothing of it."""
    with built(rank, job) as strategy:
        for _ in range(2):
            step(strategy, job, sequences())
        found = _read_all(strategy.export_state())
        step(strategy, job, sequences())
        state = strategy.export_state()
        strategy.import_state(replace(state, step_count=2, read=lambda name: ParameterState(**_parts(found, name))))
        again = _read_all(strategy.export_state())
        assert all(np.array_equal(found[name], again[name]) for name in found)
        return found


def _read_all(state: PortableState) -> dict[str, np.ndarray]:
    read = {name: state.read(name) for name in state.shapes}
    return {
        f"{part}.{name}": getattr(each, part).numpy().copy()
        for name, each in read.items()
        for part in ("master", "exp_avg", "exp_avg_sq")
    }


def _parts(found: dict[str, np.ndarray], name: str) -> dict[str, torch.Tensor]:
    return {part: torch.from_numpy(found[f"{part}.{name}"]) for part in ("master", "exp_avg", "exp_avg_sq")}


def own(folder: Path, rank: int) -> Path:
    """As the runtime names each rank's directory."""
    path = folder / f"rank-{rank}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def steps_from_here(strategy: TrainStrategy, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"loaded": weights(strategy), "drawn": torch.rand(2).tolist()}
    found["names"] = list(strategy._state())
    if job.training is not None:
        found["steps"] = [step(strategy, job, sequences()) for _ in range(3)]
    return found | {"weights": weights(strategy)}


def save_after(rank: int, job: Job, folder: Path, done: int) -> dict[str, Any]:
    """What is left of the save is written while the next steps run."""
    with built(rank, job) as strategy:
        for _ in range(done):
            step(strategy, job, sequences())
        write = strategy.save(own(folder, rank))
        assert (write is not None) == strategy.config.async_save_ckpt
        with ThreadPoolExecutor() as pool:
            written = pool.submit(write) if write is not None else None
            found = steps_from_here(strategy, job)
        if written is not None:
            written.result()
        return found


def continue_after(rank: int, job: Job, folder: Path, done: int) -> dict[str, Any]:
    """In a strategy that has been elsewhere before."""
    with built(rank, job) as strategy:
        if done:
            step(strategy, job, sequences()[:3])
        scored(strategy, job)
        strategy.load(folder / f"rank-{rank}")
        return steps_from_here(strategy, job)


def load_into(rank: int, job: Job, folder: Path) -> None:
    with built(rank, job) as strategy:
        strategy.load(folder / f"rank-{rank}")


def load_each(rank: int, job: Job, folders: list[Path]) -> list[Raised | None]:
    """What loading each of these states raises, in a strategy that stays as it was built."""
    with built(rank, job) as strategy:
        return [raised(lambda: strategy.load(folder / f"rank-{rank}")) for folder in folders]  # noqa: B023


def export(rank: int, job: Job, folder: Path) -> dict[str, Any]:
    with built(rank, job) as strategy:
        step(strategy, job, sequences())
        strategy.export_model(folder)
        return {"weights": weights(strategy), "scored": scored(strategy, job)}


def same_weights(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def furthest_from(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in other)


def train_from_files(rank: int, job: Job) -> dict[str, Any]:
    """Where loading the whole model would fail."""
    from roll_modeling import strategy

    def refuse(_spec: ModelSpec, **_: Any) -> None:
        raise AssertionError("the model was loaded whole")

    strategy.load_model = refuse
    return train(rank, job, 1)


def peak_of_build(rank: int, job: Job) -> int:
    """Bytes of anonymous memory by which this process grew at most; pages of mapped files are not among them."""

    def held() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    before, peak, done = held(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with built(rank, job):
            pass
    finally:
        done.set()
        watcher.join()
    return peak - before


def train_with_tokens_mixed(rank: int, job: Job) -> dict[str, Any]:
    """By a model whose layers also add what stands one token before, within the sequence, as some convolutions do."""
    from roll_modeling import strategy

    load = strategy.load_model

    def mix(_module: Any, inputs: tuple[Any, ...], more: dict[str, Any]) -> Any:
        hidden, inside = inputs[0], more["position_ids"][..., None] > 0
        return (hidden + torch.where(inside, hidden.roll(1, dims=1), 0.0), *inputs[1:]), more

    def load_mixing(spec: ModelSpec, **more: Any) -> Any:
        model = load(spec, **more)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(mix, with_kwargs=True)
        return model

    strategy.load_model = load_mixing
    return train(rank, job, 1)
