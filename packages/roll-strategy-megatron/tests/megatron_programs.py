"""One run of the strategy on some ranks, and what came of it: imported by the ranks."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_testing import TrainStrategyConformance, models
from roll_testing.bench import WHOLE, Case, as_array, built, micros, outputs, share, take_step, weights
from roll_testing.losses import LOSSES, TRAINING
from roll_testing.programs import fail_to_build, raised
from roll_testing.ranks import free_port
from roll_testing.train_kit import registry
from shared_tests import tiny_architectures

PRELOAD = ("megatron_on_cpu", *TrainStrategyConformance.preload, "roll_strategy_megatron.strategy")
"""Megatron is imported once for all ranks, on a machine without an accelerator by way of the shims."""
MIXTURE = models.QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
DEEPSEEK = tiny_architectures.DEEPSEEK | {
    "num_hidden_layers": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""With shared experts, scores that are scaled, and positions beyond those it was made for."""
WANT = WantedOutputs(logprobs=True, entropy=True, topk=3, temperature=0.8)


def case_on(ranks, config, model, *, training=TRAINING, name="megatron_train") -> Case:
    """A strategy with its configuration and model, on ranks of a CPU."""
    return Case(
        provider=registry().find(TrainProvider, name),
        strategy_config=config,
        model=model,
        training=training,
        world_size=ranks,
        devices=("cpu",) * ranks,
        master_port=free_port(),
    )


def offloaded(rank, case: Case, step) -> tuple[list[int], dict, dict]:
    """Bytes of the tensors that would wait on the host in a training step, and the weights after it, with and without.

    On a CPU nothing is copied: copies are made as on a device.
    """
    found: list[int] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.nbytes)
        return tensor.clone()

    def hooks(device):
        return (
            torch.autograd.graph.saved_tensors_hooks(copy, torch.Tensor.clone) if device is not None else nullcontext()
        )

    trained = []
    with patch("roll_strategy_megatron.model.inputs_on_host", hooks):
        for config in ({}, {"activation_offloading": True}):
            with built(replace(case, strategy_config=config), rank) as strategy:
                take_step(strategy, step)
                trained.append(weights(strategy))
    return found, *trained


def score_and_train(rank, case: Case, batch, steps, want=WANT, out="", state=""):
    """Outputs of the new model, what each step says, and the weights in the end.

    These also as a directory `out`, and all that is needed to go on in `state`.
    """
    with built(case, rank) as strategy:
        before, scored = weights(strategy), outputs(strategy, batch, want)
        stats = [take_step(strategy, step) for step in steps]
        if out:
            strategy.export_model(Path(out))
            mine = Path(state) / f"rank-{rank}"
            mine.mkdir(parents=True)
            strategy.save(mine)
        return {
            "place": strategy.data_rank,
            "before": before,
            "scored": scored,
            "stats": [found for found, _ in stats],
            "losses": [metrics.get("loss", 0.0) for _, metrics in stats],
            "metrics": [metrics for _, metrics in stats],
            "weights": weights(strategy),
            "memory": dict(strategy.memory()),
        }


def train_unchecked(rank, case: Case, step):
    """Whether Megatron trains a model whose sizes nothing has checked."""
    with patch("roll_strategy_megatron.config.MegatronConfig.check_model", lambda self, keys: None):
        try:
            with built(case, rank) as strategy:
                take_step(strategy, step)
        except Exception:  # Megatron's are of many kinds
            return False
        return True


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is on, as long as it is not given back; `known` was there
    before."""

    def __init__(self, known):
        super().__init__()
        self.live, self.most = 0, 0
        self._held = {each.untyped_storage()._cdata for each in known}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self._count(each.untyped_storage())
        return found

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held.add(key)
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._held.remove(key)
        self.live -= size


def export(rank, case: Case, folder, piece_bytes):
    """A directory that transformers loads; the most bytes of tensors that were there because of it, and the bytes of
    what this rank holds anyway."""
    with patch("roll_modeling.pieces.PIECE_BYTES", piece_bytes), built(case, rank) as strategy:
        with LiveBytes(strategy.part_tensors()["weights"]) as count:
            strategy.export_model(Path(folder))
        return count.most, strategy.memory()["weights"]


def read(rank, case: Case):
    """Names of the tensors that a rank reads from files; the most bytes of them that were there at once."""
    names, live, most = [], 0, 0
    from roll_strategy_megatron.bridge.source import FileSource

    get = FileSource.get

    def gone(size):
        nonlocal live
        live -= size

    def counted(source, name):
        nonlocal live, most
        found = get(source, name)
        names.append(name)
        live += found.nbytes
        most = max(most, live)
        weakref.finalize(found, gone, found.nbytes)
        return found

    with patch.object(FileSource, "get", counted), built(case, rank):
        return names, most


def loaded_weights(rank, case: Case):
    """Of the new model."""
    with built(case, rank) as strategy:
        return weights(strategy)


def save_after(rank, case: Case, steps, folder):
    """Saved after all steps but the last; weights and norm of the last. What is left to be written then is written
    after it."""
    mine = Path(folder) / f"rank-{rank}"
    mine.mkdir(parents=True)
    with patch("roll_strategy_megatron.state.FILE_BYTES", 4096), built(case, rank) as strategy:
        for step in steps[:-1]:
            take_step(strategy, step)
        write = strategy.save(mine)
        stats, _ = take_step(strategy, steps[-1])
        if write is not None:
            write()
        return stats, weights(strategy)


def resume(rank, case: Case, step, folder):
    """Loaded, and one step on."""
    mine = Path(folder) / f"rank-{rank}"
    mine.mkdir(exist_ok=True)
    with built(case, rank) as strategy:
        strategy.load(mine)
        stats, _ = take_step(strategy, step)
        return stats, weights(strategy)


def load_each(rank, case: Case, folders):
    """What is said of each of these states."""
    with built(case, rank) as strategy:
        return [said(lambda: strategy.load(Path(folder))) for folder in folders]  # noqa: B023 - called at once


def move_away(rank, case: Case, batch, step):
    """After a step: how many numbers are trained; what each part holds and how much memory is behind it, as all is here
    and as all is away; what is computed and exported with all parts here and with the weights alone; and what is
    refused."""
    with built(case, rank) as strategy:
        take_step(strategy, step)
        held = strategy.part_tensors()
        trained = sum(prod(shape) for shape in strategy.export_state().shapes.values())

        def behind():
            return {
                part: sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in every}.values())
                for part, every in held.items()
            }

        before = dict(strategy.memory()), behind(), outputs(strategy, batch, WANT), weights(strategy)
        strategy.offload(("grads", "optimizer"))
        alone = dict(strategy.memory()), behind(), outputs(strategy, batch, WANT), weights(strategy)
        refused = [said(lambda: take_step(strategy, step)), said(strategy.export_state)]
        strategy.offload(("weights",))
        away = dict(strategy.memory()), behind()
        refused += [said(lambda: outputs(strategy, batch, WANT)), said(strategy.export_weights)]
        strategy.onload(("weights", "grads", "optimizer"))
        after = dict(strategy.memory()), behind(), outputs(strategy, batch, WANT), weights(strategy)
        return trained, before, alone, away, after, refused


def said(call):
    """What a refusal says."""
    try:
        call()
    except (UnsupportedError, CheckpointError) as error:
        return str(error)
    return ""


def adapters_around(rank, case: Case, steps):
    """As they are exported before the steps and after, and what the steps say."""
    with built(case, rank) as strategy:
        before = {name: as_array(each) for name, each in strategy.export_adapters()}
        stats = [take_step(strategy, step)[0] for step in steps]
        return before, stats, {name: as_array(each) for name, each in strategy.export_adapters()}


def train_and_export(rank, case: Case, folder, steps):
    """A directory, after some steps."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        strategy.export_model(Path(folder))


def train_alike(rank, case: Case, batch, times):
    """The norm of the gradient of so many times the same microbatch, for each of `times`."""
    norms = []
    with built(case, rank) as strategy:
        (micro,) = micros(share(strategy, batch), batch, WHOLE)
        for number in times:
            strategy.forward_backward([micro] * number, LOSSES["sft"])
            norms.append(strategy.optimizer_step().grad_norm)
    return norms


def masters_after(rank, case: Case, steps):
    """Of all parameters, after some steps, and the bytes of optimizer state on this rank's device."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        state = strategy.export_state()
        return {name: as_array(state.read(name).master) for name in state.shapes}, strategy.memory()["optimizer"]


def made_of(rank, case: Case):
    """Names of the classes of all modules of the model."""
    with built(case, rank) as strategy:
        return {type(each).__name__ for run in strategy.runs for each in run.modules()}


def copy_state(rank, case: Case, read_from, write_to):
    """What is read is written again."""
    mine, again = Path(read_from) / f"rank-{rank}", Path(write_to) / f"rank-{rank}"
    again.mkdir(parents=True)
    with built(case, rank) as strategy:
        strategy.load(mine)
        write = strategy.save(again)
        assert write is None


def fail_to_build_in(rank, case: Case, environment):
    """Where these variables are set."""
    with patch.dict("os.environ", environment):
        return fail_to_build(rank, case)


def configure(rank, settings, keys):
    """What making Megatron's config raises."""
    from roll_strategy_megatron.config import MegatronConfig
    from roll_strategy_megatron.engine import LayerSpec
    from roll_strategy_megatron.model import make_config

    spec, config = ModelSpec(random_init={"model_type": "qwen3"}), MegatronConfig.model_validate(keys)
    return raised(lambda: make_config(settings, config, spec, torch.float32, LayerSpec(engine=False)))


def lacking_engine_older_than(rank, version):
    """Why Transformer Engine cannot be used, if it has to be at least of this version."""
    from roll_strategy_megatron.engine import lacking_engine

    with patch("roll_strategy_megatron.engine.OLDEST", version):
        return lacking_engine()
