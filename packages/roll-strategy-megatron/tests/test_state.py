"""A state saved by one arrangement of ranks loads in any other, up to float32 rounding; offloads free device memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from fused_adam import with_fused_adam
from megatron_programs import MIXTURE, case_on, load_each, move_away, resume, save_after

from roll_core.spec.model import LoraSpec
from roll_testing.bench import Step
from roll_testing.bounds import check_rows, check_same, distance
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import export_between, go_on
from roll_testing.ranks import free_port
from shared_tests.stored_buffers import check_stored_buffers

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
FOUR = QWEN3 | {"num_hidden_layers": 4}
EP = {"expert_model_parallel_size": 2}
CUT = {"expert_tensor_parallel_size": 2}
WHOLE = TP | {"expert_tensor_parallel_size": 1}
LATER = {"async_save_ckpt": True}


def steps(number):
    return [Step(sequences=make_batch(61, seed=i), loss=LOSSES["sft"]) for i in range(number)]


@pytest.mark.parametrize(
    ("architecture", "saved_by", "read_by"),
    [
        pytest.param(QWEN3, (2, TP), (2, PP), id="tensor to pipeline"),
        pytest.param(MIXTURE, (2, EP | LATER), (1, {}), id="experts, written later, to one rank"),
        pytest.param(FOUR, (2, VPP), (2, PP), id="interleaved to plain stages", marks=pytest.mark.slow),
        pytest.param(FOUR, (1, {}), (2, VPP), id="one rank to interleaved stages", marks=pytest.mark.slow),
        pytest.param(MIXTURE, (1, {}), (2, EP), id="one rank to experts", marks=pytest.mark.slow),
        pytest.param(MIXTURE, (2, CUT), (2, WHOLE), id="experts cut to whole ones", marks=pytest.mark.slow),
        pytest.param(QWEN3, (2, PP | LATER), (4, TP), id="pipeline to tensor and data", marks=pytest.mark.slow),
    ],
)
def test_state_resumes_on_another_arrangement_of_ranks(host, tmp_path, architecture, saved_by, read_by):
    model = write_checkpoint(tmp_path / "model", architecture, task="causal_lm", vocab_size=61)
    case = case_on(*saved_by, model)
    folder = str(tmp_path / "state")
    expected, weights = host.run(save_after, case, steps(3), folder, num_ranks=case.world_size, timeout_s=150)[0]
    files = list((tmp_path / "state" / "rank-0").glob("state-*.safetensors"))
    assert len(files) > 2 * case.world_size
    case = case_on(*read_by, model)
    found, again = host.run(resume, case, steps(3)[-1], folder, num_ranks=case.world_size, timeout_s=150)[0]
    assert found.learning_rate == expected.learning_rate
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert distance(again, weights) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "written_by", "read_by"),
    [
        pytest.param(QWEN3 | {"tie_word_embeddings": True}, (2, PP), (2, TP), id="tied, pipeline to tensor"),
        pytest.param(MIXTURE, (2, EP), (1, {}), id="experts to one rank", marks=pytest.mark.slow),
    ],
)
def test_portable_state_moves_between_arrangements(host, tmp_path, architecture, written_by, read_by):
    model = write_checkpoint(tmp_path / "model", architecture, task="causal_lm", vocab_size=61)
    case = case_on(*written_by, model)
    expected = host.run(export_between, case, steps(4), 2, str(tmp_path), num_ranks=case.world_size, timeout_s=150)[0]
    case = case_on(*read_by, model)
    spoil = [Step(sequences=make_batch(61, seed=50), loss=LOSSES["sft"])]
    found = host.run(go_on, case, spoil, steps(4)[2:], str(tmp_path), num_ranks=case.world_size, timeout_s=150)[0]
    for one, other in zip(found.stats, expected.stats, strict=True):
        assert one.learning_rate == other.learning_rate
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert distance(found.after, expected.after) < 1e-5


def test_stored_buffers_are_part_of_the_portable_state(host, tmp_path):
    def run(program, case, *arguments):
        return host.run(program, case.with_(master_port=free_port()), *arguments, num_ranks=2, timeout_s=100)

    check_stored_buffers(run, case_on(2, PP, None), tmp_path)


def test_optimizer_with_step_counts_by_group_resumes(host, tmp_path):
    model = write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=61)
    case, folder, every = case_on(1, {}, model), str(tmp_path / "state"), steps(4)
    (plain,) = host.run(save_after, case, every, str(tmp_path / "plain"), timeout_s=100)
    (expected,) = host.run(with_fused_adam, save_after, case, every, folder, timeout_s=100)
    (found,) = host.run(with_fused_adam, resume, case, every[-1], folder, timeout_s=100)
    assert found[0] == expected[0]
    check_same("weights", found[1], expected[1])
    assert distance(found[1], plain[1]) < 1e-5


SPOILT = (
    ("state.json", lambda folder: (folder / "state.json").write_text("{")),
    ("format 1", lambda folder: rewrite(folder, format=1)),
    ("lm_head.weight", lambda folder: rewrite(folder, parameters=["other.weight"])),
    ("embed_tokens.weight", lambda folder: (folder / "written-0.json").write_text("{}")),
    ("header", lambda folder: max(folder.glob("state-*.safetensors")).write_bytes(b"\0" * 7)),
    ("random.safetensors", lambda folder: (folder / "random.safetensors").write_bytes(b"\0" * 9)),
)
"""What the error names, and what is done to a state."""


def test_a_state_that_cannot_be_read_is_named(host, tmp_path):
    case = case_on(1, {}, write_checkpoint(tmp_path / "model", QWEN3, task="causal_lm", vocab_size=61))
    host.run(save_after, case, steps(1), str(tmp_path / "state"), timeout_s=100)
    folders = [tmp_path / f"spoilt-{number}" for number in range(len(SPOILT))]
    for folder, (_, spoil) in zip(folders, SPOILT, strict=True):
        shutil.copytree(tmp_path / "state" / "rank-0", folder)
        spoil(folder)
    (refusals,) = host.run(load_each, case, [str(each) for each in folders], timeout_s=100)
    for folder, (named, _), refused in zip(folders, SPOILT, refusals, strict=True):
        assert mentions(refused, folder, named)


def rewrite(folder, **values):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | values))


LORA = LoraSpec(targets=("o_proj", "gate_proj", "down_proj"), rank=2, alpha=6.0)


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded_parts_hold_no_memory_and_weights_compute(host, tmp_path, dtype, lora):
    model = replace(write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61), dtype=dtype, lora=lora)
    case = case_on(2, EP, model)
    batch = make_batch(61, seed=10)
    answers = host.run(move_away, case, batch, steps(1)[0], num_ranks=2, timeout_s=150)
    trained = answers[0][0]
    if lora is None:
        assert trained == sum(each.size for each in answers[0][1][3].values())
    # Two moments, and masters where the weights are not masters themselves; adapters are float32 beneath any dtype.
    kept = sum(before["optimizer"] for _, (before, *_), *_ in answers)
    assert kept == pytest.approx(trained * (12 if dtype == "bf16" and lora is None else 8), rel=0.02)
    for _, before, alone, away, after, refused in answers:
        says, behind, scored, weights = before
        assert says["grads"] >= trained * 4 / 2
        assert all(behind[part] >= size for part, size in says.items())
        assert alone[0] == {"weights": says["weights"], "grads": 0, "optimizer": 0}
        assert alone[1] == {"weights": behind["weights"], "grads": 0, "optimizer": 0}
        assert away == ({"weights": 0, "grads": 0, "optimizer": 0},) * 2
        assert after[:2] == (says, behind)
        for found, held in (alone[2:], after[2:]):
            check_same("weights", held, weights)
            for name, rows in scored.items():
                check_rows(name, found[name], rows, 0.0)
        named = [[part for part in ("weights", "grads", "optimizer") if mentions(each, part)] for each in refused]
        assert named == [["grads", "optimizer"]] * 2 + [["weights"]] * 2
