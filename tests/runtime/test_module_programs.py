"""Module programs between pipeline and strategy: batches, shares of ranks, steps, checks of results."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_core.builtin.cpu import CpuPlatform
from roll_core.config import load
from roll_core.data.module_rows import balance_rows, check_rows, module_batches, output_rows
from roll_core.errors import ContractError, DataError, ModelError, NonFiniteError, UnsupportedError
from roll_core.plugins.registry import Registry
from roll_core.runtime.run.roles import GroupTrainRole
from roll_core.runtime.workers.build import _check_support, group_specs
from roll_core.runtime.workers.train import BatchLimits, TrainWorker
from roll_core.spec.config import TrainingArguments, TrainWorkerConfig
from roll_core.spec.model import LoraSpec, MeshInfo
from roll_core.spec.module_program import ModuleRow
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.providers import TrainCapabilities, TrainProvider
from roll_core.spec.train import LossOutput, StepStats, TrainingSpec
from roll_core.types import DataRank
from roll_modeling.module_programs import StrategyModule, model_library
from roll_modeling.optimizer import average_decay
from roll_testing.errors import raises_error
from roll_testing.tiny_flow import FLOW, Euler, FlowMatching, TinyFlowLibrary, flow_rows
from shared_tests.hf_plugins import hf_plugins


def row(number: int, *shape: int, dtype: str = "float32") -> ModuleRow:
    return ModuleRow(id=f"row {number}", arrays={"x": np.full(shape, number, dtype)})


# -- batches -----------------------------------------------------------------------------------------------------------


def test_rows_of_equal_form_share_batches_of_at_most_the_limit():
    rows = [row(0, 2), row(1, 3), row(2, 2), row(3, 2, dtype="int64"), row(4, 2), row(5, 3)]
    found = module_batches(rows, max_rows=2, total_rows=9, epoch=3)
    assert {batch.epoch for _, batch in found} == {3}
    assert [indices for indices, _ in found] == [[0, 2], [4], [1, 5], [3]]
    assert found[0][1].ids == ("row 0", "row 2")
    assert found[0][1].tensors["x"].tolist() == [[0, 0], [2, 2]]
    assert found[3][1].tensors["x"].dtype == torch.int64
    assert {batch.total_rows for _, batch in found} == {9}
    assert module_batches([], max_rows=2) == []


def test_scalars_batch_per_row_and_other_names_batch_apart():
    rows = [ModuleRow(id="a", arrays={"t": np.float32(1)}), ModuleRow(id="b", arrays={"u": np.float32(2)})]
    check_rows(rows)
    (_, first), (_, second) = module_batches(rows, max_rows=8)
    assert first.tensors["t"].shape == (1,)
    assert list(second.tensors) == ["u"]


def test_rows_without_numbers_are_refused():
    for array in (np.array(["text"]), np.array([None]), [1.0]):
        with raises_error(DataError, "odd", "x"):
            check_rows([ModuleRow(id="odd", arrays={"x": array})])


def test_large_rows_are_spread_over_ranks():
    rows = [row(0, 8), row(1, 1), row(2, 1), row(3, 1)]
    assert balance_rows(rows, 2) == [[0], [1, 2, 3]]
    assert balance_rows([], 3) == [[], [], []]


def test_outputs_in_bfloat16_become_float32():
    found = output_rows({"x": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16), "n": torch.tensor([1, 2])}, 2)
    assert found[1]["x"].dtype == np.float32
    assert [each["x"].tolist() for each in found] == [[1.5], [2.5]]
    assert found[1]["n"] == 2


# -- a worker ----------------------------------------------------------------------------------------------------------


def worker(training: TrainingSpec | None = None, **model) -> TrainWorker:
    """A worker of `hf_train` on one rank, without executor."""
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy

    made = object.__new__(TrainWorker)
    made.strategy = HFTrainStrategy(HFTrainConfig(), training)
    made.strategy.build(replace(FLOW, **model), MeshInfo(role="flow"))
    made.role, made.deterministic = "flow", True
    made.limits = BatchLimits(train_sequences=2, infer_sequences=3)
    return made


def test_worker_returns_outputs_of_ragged_rows_in_order():
    rows = [each for pair in zip(flow_rows(3), shorter_rows(3), strict=True) for each in pair]
    found = worker().run_program(rows, shapes)
    assert [each["size"].item() for each in found] == [6, 5, 6, 5, 6, 5]
    assert [each["first"].item() for each in found] == [each.arrays["x"][0] for each in rows]


def shorter_rows(number):
    return [replace(each, arrays={**each.arrays, "x": each.arrays["x"][:5]}) for each in flow_rows(number, seed=1)]


def shapes(module, batch):
    x = batch.tensors["x"]
    return {"size": torch.full((len(x),), x.shape[1]), "first": x[:, 0]}


def test_a_worker_without_rows_takes_part():
    trained = worker(TrainingSpec(learning_rate=1e-2))
    assert trained.run_program([], Euler()) == []
    metrics, stats = trained.update_program([], FlowMatching(), 7)
    assert metrics == {}
    assert stats.grad_norm == 0


def no_mapping(module, batch):
    return batch.tensors["x"]


def too_few(module, batch):
    return {"x": batch.tensors["x"][:-1]}


def no_tensor(module, batch):
    return {"x": [0.0] * len(batch.ids)}


def of_each_row(module, batch):
    return LossOutput(loss=module(batch.tensors["x"], batch.tensors["sigma"], batch.tensors["cond"]).sum(dim=1))


def no_loss_output(module, batch):
    return torch.zeros(())


def odd_metric(module, batch):
    return LossOutput(loss=torch.zeros(()), metrics={"odd": batch.tensors["x"]})


@pytest.mark.parametrize("program", [no_mapping, too_few, no_tensor, partial(too_few)])
def test_a_program_that_returns_no_tensors_of_the_rows_is_named(program):
    name = getattr(program, "func", program).__name__
    with raises_error(ContractError, f"test_module_programs.{name}"):
        worker().run_program(flow_rows(), program)


@pytest.mark.parametrize("loss", [of_each_row, no_loss_output, odd_metric])
def test_a_loss_that_is_no_scalar_with_metrics_is_named(loss):
    with raises_error(ContractError, f"test_module_programs.{loss.__name__}"):
        worker(TrainingSpec(learning_rate=1e-2)).update_program(flow_rows(), loss, 7)


def test_the_package_of_a_program_is_named():
    with raises_error(ContractError, "roll-testing"):
        worker().run_program(flow_rows(), FlowMatching())


def test_non_finite_loss_input_names_its_row():
    rows = flow_rows()
    rows[3].arrays["noise"][0] = np.nan
    with raises_error(NonFiniteError, rows[3].id, "noise") as caught:
        worker(TrainingSpec(learning_rate=1e-2)).update_program(rows, FlowMatching(), 7)
    assert rows[2].id not in str(caught.value)


# -- the module --------------------------------------------------------------------------------------------------------


def test_contexts_that_the_role_does_not_have_are_refused():
    for weights in ("base", "average"):
        with raises_error(UnsupportedError):
            worker(TrainingSpec(learning_rate=1e-2)).run_program(flow_rows(), Euler(weights=weights))


def nested(module, batch):
    x, sigma, cond = (batch.tensors[name] for name in ("x", "sigma", "cond"))
    with module.average():
        first = module(x, sigma, cond)
        with module.average():
            pass
        second = module(x, sigma, cond)
    return {"same": (first == second).all(dim=1), "live": (module(x, sigma, cond) == first).all(dim=1)}


def test_an_average_within_an_average_changes_nothing():
    trained = worker(TrainingSpec(learning_rate=1e-1, ema_decay=0.9))
    trained.update_program(flow_rows(), FlowMatching(), 7)
    (found,) = trained.run_program(flow_rows(1), nested)
    assert found["same"]
    assert not found["live"]


def test_times_keep_their_precision_and_inputs_get_compute_dtype():
    seen = {}

    def forward(x, sigma, *, more):
        seen.update(x=x.dtype, sigma=sigma.dtype, cond=more["cond"].dtype, mask=more["mask"].dtype)

    module = StrategyModule(forward, device="cpu", dtype=torch.bfloat16)
    ones = torch.ones(2, 3)
    module(ones, torch.ones(2), more={"cond": ones, "mask": ones.long()})
    assert seen == {"x": torch.bfloat16, "sigma": torch.float32, "cond": torch.bfloat16, "mask": torch.int64}


def test_the_decay_of_the_average_has_a_ramp():
    spec = TrainingSpec(learning_rate=1, ema_decay=0.5, ema_ramp=0.2)
    assert [average_decay(spec, step) for step in (1, 2, 3, 4)] == [0.2, 0.4, 0.5, 0.5]
    assert average_decay(replace(spec, ema_ramp=None), 1) == 0.5


def test_the_average_of_a_batch_moves_after_its_last_step():
    trained = worker(TrainingSpec(learning_rate=1e-1, ema_decay=0.5, ema_ramp=0.15, ema_per_batch=True))
    optimizer = trained.strategy.optimizer
    name, master = next(iter(optimizer.masters.items()))
    start = master.detach().clone()
    for _ in range(2):
        trained.update_program(flow_rows(), FlowMatching(), 7)
        assert torch.equal(optimizer.averages[name], start)
    trained.move_averages()
    torch.testing.assert_close(optimizer.averages[name], 0.3 * start + 0.7 * master.detach())  # 0.15 × 2


@pytest.mark.parametrize("library", ["nowhere:Library", "roll_testing.tiny_flow:Nothing", "torch.nn:Linear"])
def test_a_library_that_is_none_is_refused(library):
    with raises_error(ModelError, library):
        model_library(replace(FLOW, library=library))


# -- a role ------------------------------------------------------------------------------------------------------------


class FakeGroup:
    """Ranks that return the numbers of their rows."""

    role, lost = "flow", frozenset()

    def __init__(self, ranks):
        self.ranks, self.world_size = ranks, len(ranks)
        self.steps, self.epochs = [], []

    async def call(self, method, calls, deadline_s=None):
        if method == "start":
            return self.ranks
        if method == "run_program":
            return [[{"x": each.arrays["x"][0]} for each in rows] for rows, _ in calls.values()]
        self.steps.append([[each.id for each in rows] for rows, *_ in calls.values()])
        self.epochs.append(next(epoch for *_, epoch in calls.values()))
        assert {total for _, _, total, _ in calls.values()} == {sum(len(rows) for rows, *_ in calls.values())}
        return [
            ({"rows": float(len(rows))}, StepStats(grad_norm=1.0, learning_rate=0.1)) for rows, *_ in calls.values()
        ]


def flow_role(group, per_device=2, accumulation=1, **capabilities):
    args = TrainingArguments(per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation)
    can = TrainCapabilities(module_programs=True) if not capabilities else TrainCapabilities(**capabilities)
    role = GroupTrainRole("flow", TrainWorkerConfig(training_args=args), group, trains=True, capabilities=can)
    asyncio.run(role.start())
    return role


def test_outputs_come_back_in_the_order_of_the_rows():
    group = FakeGroup([DataRank(index=i, size=3) for i in range(3)])
    rows = [row(i, 1 + (5 * i) % 4) for i in range(10)]
    found = asyncio.run(flow_role(group).run_program(rows, Euler()))
    assert [each["x"] for each in found] == list(range(10))
    assert asyncio.run(flow_role(group).run_program([], Euler())) == []


def test_update_has_the_configured_steps_and_counts_versions():
    group = FakeGroup([DataRank(index=0, size=2), DataRank(index=1, size=2)])
    role = flow_role(group, per_device=2, accumulation=1)
    rows = [row(i, 2) for i in range(8)]
    result = asyncio.run(role.update_program(rows, FlowMatching(), epochs=2))
    assert group.steps == [[["row 0", "row 2"], ["row 1", "row 3"]], [["row 4", "row 6"], ["row 5", "row 7"]]] * 2
    assert group.epochs == [0, 0, 1, 1]
    assert (result.num_steps, result.num_tokens, role.weight_version) == (4, 0, 4)
    assert result.metrics == {"rows": 4.0, "grad_norm": 1.0, "lr": 0.1}


def test_epochs_shuffle_rows_by_the_seed():
    rows = [row(i, 2) for i in range(8)]

    def steps(seed):
        group = FakeGroup([DataRank()])
        role = flow_role(group, per_device=4)
        asyncio.run(role.update_program(rows, FlowMatching(), epochs=2, shuffle_seed=seed))
        return [step[0] for step in group.steps]

    assert steps(1) == steps(1) != steps(2)
    for epoch in (steps(1)[:2], steps(1)[2:]):
        assert sorted(name for step in epoch for name in step) == [f"row {i}" for i in range(8)]


def test_a_strategy_without_module_programs_is_refused():
    role = flow_role(FakeGroup([DataRank()]), topk=True)
    for call in (role.run_program, role.update_program):
        with raises_error(UnsupportedError, "flow", "module_programs"):
            asyncio.run(call([row(0, 1)], Euler()))


def test_every_rank_gets_total_rows_of_the_whole_step():
    group = FakeGroup([DataRank(index=0, size=2), DataRank(index=1, size=2)])
    result = asyncio.run(flow_role(group).update_program([row(0, 2)], FlowMatching()))
    assert group.steps == [[["row 0"], []]]
    assert result.metrics["rows"] == 1.0


# -- files of a model --------------------------------------------------------------------------------------------------

ADAPTERS = LoraSpec(targets=("all-linear",), rank=2, alpha=4.0, export="adapter")
TRAINING = TrainingSpec(learning_rate=1e-2, lr_scheduler_type="constant")


def test_exported_adapters_load_in_peft(tmp_path):
    from peft import PeftModel

    base, adapters = tmp_path / "base", tmp_path / "adapters"
    base.mkdir()
    adapters.mkdir()
    worker().strategy.export_model(base)
    trained = worker(TRAINING, path=str(base), random_init=None, lora=ADAPTERS)
    trained.update_program(flow_rows(), FlowMatching(), 7)
    trained.strategy.export_model(adapters)
    assert sorted(path.name for path in adapters.iterdir() if path.suffix in (".json", ".safetensors")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(TinyFlowLibrary().load(replace(FLOW, path=str(base))), str(adapters))
    given = {name: torch.from_numpy(np.stack([each.arrays[name] for each in flow_rows()])) for name in ("x", "cond")}
    found = trained.run_program(flow_rows(), velocities)
    expected = loaded(given["x"], torch.zeros(7), cond=given["cond"])
    assert np.allclose([each["v"] for each in found], expected.detach().numpy(), atol=1e-6)


def velocities(module, batch):
    x = batch.tensors["x"]
    return {"v": module(x, torch.zeros(len(x)), cond=batch.tensors["cond"])}


def test_target_all_linear_selects_the_linear_layers_of_blocks():
    trained = worker(TRAINING, lora=replace(ADAPTERS, export="merged")).strategy.adapters.trained()
    layers = {name.partition(".lora_")[0] for name in trained}
    assert layers == {f"blocks.{at}.{name}" for at in (0, 1) for name in ("up", "down")}
    with raises_error(ModelError, "lora_target", "blocks.0.upp"):
        worker(TRAINING, lora=replace(ADAPTERS, targets=("blocks.0.upp",)))


@pytest.mark.parametrize("lora", [None, replace(ADAPTERS, export="merged")], ids=["whole", "adapters"])
def test_a_portable_state_continues_as_its_source(lora, tmp_path):
    source, target = worker(TRAINING, lora=lora), worker(TRAINING, lora=lora)
    source.update_program(flow_rows(), FlowMatching(), 7)
    source.place = SimpleNamespace(rank=0)
    source.model = source.strategy.spec
    source.save_portable(str(tmp_path / "state"))
    target.load_portable(str(tmp_path / "state"))
    rows = flow_rows(seed=5)
    found, expected = (each.update_program(rows, FlowMatching(), 7) for each in (target, source))
    assert found == expected


# -- what is refused before a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "capabilities", "names"),
    [
        ({"library": "acme.flows:Library"}, {}, "acme.flows:Library"),
        ({}, {}, "flow"),
        ({"ema_decay": 0.9}, {"module_programs": True}, "ema_decay"),
    ],
)
def test_a_strategy_that_cannot_run_the_role_is_refused(given, capabilities, names):
    can = TrainCapabilities(tasks=("causal_lm", "flow") if capabilities else ("causal_lm",), **capabilities)
    provider = TrainProvider(name="acme", target="acme:Strategy", summary="", capabilities=can)
    role = RoleSpec(name="actor", kind="train", task="flow", **given)
    model = replace(FLOW, library=role.library)
    with raises_error(UnsupportedError, "actor", "acme", names):
        _check_support(role, TrainWorkerConfig(), provider, model, CpuPlatform())


def test_a_role_of_another_kind_than_its_config_is_refused(tmp_path):
    rows, strategy = {"file_name": "rows.jsonl"}, {"strategy_name": "hf_train"}
    model = {"random_init": {"model_type": "qwen3"}}
    values = {"pipeline": "sft", "sft_train": {"model_args": model, "data_args": rows, "strategy_args": strategy}}
    registry = Registry(hf_plugins())
    config = load(values, [], registry).config
    with raises_error(ContractError, "sft_train", "score", "train"):
        group_specs([RoleSpec(name="sft_train", kind="score")], config, registry, CpuPlatform(), {}, tmp_path)
