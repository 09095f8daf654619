"""Check that a model's stored buffers are part of the portable state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.spec.train import WantedOutputs
from roll_modeling.portable_files import opened_portable_state
from roll_testing.bench import built, outputs
from roll_testing.bounds import check_rows
from roll_testing.models import make_batch, write_checkpoint
from roll_testing.programs import export_between
from roll_testing.reference import Reference, TransformersModel
from shared_tests.tiny_architectures import DEEPSEEK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Floats, TrainSequence
    from roll_testing.bench import Case

VOCABULARY = 61
WANT = WantedOutputs(logprobs=True)


def write_biased_checkpoint(folder: Path, *, seed: int) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Write a model whose expert-selection biases are sampled with `seed`; all other weights are fixed.

    Returns its spec, and the biases by name.
    """
    import torch
    from safetensors.torch import load_file, save_file

    spec = write_checkpoint(folder, DEEPSEEK, task="causal_lm", vocab_size=VOCABULARY)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    biases = {
        name: torch.randn(each.shape, generator=generator)
        for name, each in tensors.items()
        if name.endswith("e_score_correction_bias")
    }
    save_file(tensors | biases, file, metadata={"format": "pt"})
    return spec, biases


def compute_imported(
    rank: int, case: Case, batch: Sequence[TrainSequence], state_folder: str, out: str
) -> dict[str, dict[str, Floats]]:
    """Import a state, export the model into `out`, and return the model's outputs for a batch."""
    with built(case, rank) as strategy:
        with opened_portable_state(Path(state_folder)) as state:
            strategy.import_state(state)
        strategy.export_model(Path(out))
        return outputs(strategy, batch, WANT)


def check_stored_buffers(run: Callable[..., Sequence[Any]], case: Case, folder: Path) -> None:
    """Fail unless importing a portable state replaces a model's stored buffers.

    The state of one model is imported by a role that started from another model, which differs only in its biases. The
    role must then compute and export what the first model does. `run(program, case, *arguments)` returns the result of
    each rank.
    """
    from safetensors.torch import load_file

    model, biases = write_biased_checkpoint(folder / "one", seed=1)
    other, _ = write_biased_checkpoint(folder / "other", seed=2)
    batch = make_batch(VOCABULARY)
    expected = Reference(TransformersModel(model), "causal_lm").by_sequence(batch, WANT)["logprobs"]
    unlike = Reference(TransformersModel(other), "causal_lm").by_sequence(batch, WANT)["logprobs"]
    assert max(abs(row - expected[key]).max() for key, row in unlike.items() if len(row)) >= 0.01, (
        "the two models have the same logprobs, so the test would pass without import"
    )
    (folder / "state").mkdir()
    run(export_between, case.with_(model=model), [], 0, str(folder / "state"))
    answers = run(compute_imported, case.with_(model=other), batch, str(folder / "state"), str(folder / "out"))
    found = {key: row for each in answers for key, row in each.get("logprobs", {}).items()}
    check_rows("logprobs", found, expected, 1e-4)
    exported: dict[str, Tensor] = {}
    for file in (folder / "out").glob("*.safetensors"):
        exported |= load_file(file)
    for name, bias in biases.items():
        assert exported[name].equal(bias), f"{name} was exported as {exported[name]}, expected {bias}"
