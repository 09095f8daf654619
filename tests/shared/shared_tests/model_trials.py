"""Trials of a strategy with one model type: what a row of `models.json` has. See `roll_modeling.model_table`.

Each trial returns a result by column: the largest error if it worked, otherwise the reason why it did not. Reference is
transformers, on the same stored weights, one sequence at a time and with eager attention.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import types
import typing
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.errors import EngineDiedError, RollError, one_line
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.train import WantedOutputs
from roll_core.spec.weights import digest
from roll_modeling.model_table import NUMBER_OF_EXPERTS, ON_A_CPU, POSITIONS, ROUNDING, TYPES
from roll_modeling.portable_state import router_buffers
from roll_testing.bench import Step, built, outputs, take_step, weights
from roll_testing.bounds import check_names, distance
from roll_testing.image_models import MODEL_TYPES, tiny_vision
from roll_testing.infer.engine import Engine, ask
from roll_testing.infer.models import Oracle, log_softmax, moved
from roll_testing.losses import LOSSES, TRAINING
from roll_testing.models import make_batch, write_checkpoint
from roll_testing.publishing import published
from roll_testing.reference import Reference, TransformersModel
from shared_tests.tiny_architectures import MULTIMODAL, write_multimodal
from shared_tests.tiny_models import VOCABULARY, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.train import TrainStrategy
    from roll_core.types import Floats, GenerateRequest, TokenIds, TrainSequence
    from roll_testing.bench import Case
    from roll_testing.infer.engine import Setup

    Row = dict[str, Any]

EMPTY: Mapping[str, Any] = types.MappingProxyType({})
REASON_CHARS = 200
"""Length to which reasons are cut."""
LOGGED = re.compile("(root cause|reason) above")
"""In messages of engines whose processes print the reason."""
NOISE = re.compile(
    r"^(roll_core\.errors\.\w+: |AssertionError: |\w+ rank \d+: |\w+ cannot start with this model and strategy_config: "
    r"|1 validation error for ModelConfig Value error, )+"
)
"""Beginnings of messages that are the same for all types."""
PRINTED = re.compile(
    r"""^(?:.*\]\ )?(?:
    \ *File\ ".*?(?P<file>\w+\.py)",\ line\ (?P<line>\d+),\ in\ .*\n(?P<code>.+)\n(?:[\ ^~]+\n)?AssertionError
    |(?P<error>(?:[a-z_]+\.)*[A-Z]\w*(?:Error|Exception):\ .+))$""",
    re.MULTILINE | re.VERBOSE,
)
"""The last line of a printed traceback, in a log or not; of an assertion without a message its code and place."""
SFT = LOSSES["sft"]
ONE_STEP = replace(TRAINING, weight_decay=0.0)
LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
OUTPUTS = WantedOutputs(logprobs=True, entropy=True)
NOT_IMPLEMENTED = re.compile(r"(?P<architecture>\w+) has no SGlang implementation")
"""In SGLang's message if it has no such model, or cannot import its module."""
DEVICE_INDEPENDENT = re.compile(
    "not supported for now|was supported in|does not dispatch through|has no model type|has no SGlang implementation"
    "|in the manifest|has no place for or cannot read|not found in the forward method"
)
"""Reasons for which an engine runs a type on no device: it does not have the architecture, or its weights have other
names or shapes than those that are sent."""
NUM_BYTES = 256
"""Later tokens of models with a processor are special: an engine expects an image at some."""
LENGTHS = (1, 3, 17, 9)
"""Lengths of an engine's prompts, in tokens."""
NEW_TOKENS = 12


def write_tiny(
    folder: Path,
    model_type: str,
    replaced: Mapping[str, Any] = EMPTY,
    latent: Mapping[str, Any] = EMPTY,
    *,
    images: bool = False,
) -> ModelSpec:
    """Write a tiny model of this type, of random weights, and return its spec.

    `replaced` replaces config keys, and before it `latent` if the type has latent attention. With `images`, a model
    with images has a tokenizer and a processor beside it.
    """
    if images and model_type in MODEL_TYPES:
        return ModelSpec(path=str(tiny_vision(folder, model_type, num_heads=2)))
    if model_type in MULTIMODAL:
        return write_multimodal(folder, model_type)
    keys = tiny_config(model_type)
    if "kv_lora_rank" in keys:
        keys |= latent
    return write_checkpoint(folder, keys | dict(replaced), task="causal_lm", vocab_size=VOCABULARY)


class StoredModel(TransformersModel):
    """The stored model, loaded by the class that its config names."""

    def __init__(self, path: str) -> None:
        import transformers

        (name,) = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))["architectures"]
        load = getattr(transformers, name).from_pretrained
        self.module, info = load(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        self.module.eval()
        lost = sorted(info["missing_keys"])
        assert not lost, f"the files lack {len(lost)} parameters, among them {lost[0]}"


def vocabulary(spec: ModelSpec) -> int:
    """Number of tokens that prompts and batches are sampled from."""
    keys = json.loads(Path(spec.path, "config.json").read_text(encoding="utf-8"))
    return int(keys.get("text_config", keys)["vocab_size"])


# -- train strategies --------------------------------------------------------------------------------------------------


def train_row(rank: int, case: Case, folder: str) -> Row:
    """Columns `forward`, `step`, `publish`, `export` and `lora` of a train strategy on one rank."""
    row: Row = {}
    try:
        with built(case.with_(training=ONE_STEP), rank) as strategy:
            reference = Reference(StoredModel(case.model.path), "causal_lm")
            row["forward"] = _tried(lambda: _outputs_error(strategy, reference))
            row["step"] = _tried(lambda: _step_error(strategy, reference))
            row["publish"] = _tried(lambda: _publish_error(strategy, rank, reference))
            row["export"] = _tried(lambda: _export_error(strategy, Path(folder, "whole")))
    except Exception as error:  # any failure of an architecture is a result
        return dict.fromkeys(("forward", "step", "publish", "export", "lora"), reason(error))
    row["lora"] = _tried(lambda: _lora_error(rank, case, Path(folder, "merged")))
    return row


def split_error(rank: int, case: Case) -> float:
    """Error of outputs, and of a step, of a train strategy on several ranks of one replica."""
    with built(case.with_(training=ONE_STEP), rank) as strategy:
        reference = Reference(StoredModel(case.model.path), "causal_lm")
        return max(_outputs_error(strategy, reference), _step_error(strategy, reference))


def _batch(reference: Reference) -> list[TrainSequence]:
    config: Any = reference.model.module.config
    return make_batch(config.get_text_config().vocab_size)


def _outputs_error(strategy: TrainStrategy, reference: Reference) -> float:
    batch = _batch(reference)
    expected = reference.by_sequence(batch, OUTPUTS)
    found = outputs(strategy, batch, OUTPUTS)
    if not found:  # not a leader
        return 0.0
    return max(_largest(found[name], expected[name]) for name in expected)


def _step_error(strategy: TrainStrategy, reference: Reference) -> float:
    """Relative distance of the change by one step of AdamW. Also moves `reference`."""
    step = Step(sequences=_batch(reference), loss=SFT)
    start, before = reference.weights(), weights(strategy)
    (expected,) = reference.train(ONE_STEP, [step])
    stats, _ = take_step(strategy, step)
    assert abs(stats.grad_norm - expected.grad_norm) <= ROUNDING * expected.grad_norm, (
        f"the gradient's norm is {stats.grad_norm:.6g}, expected {expected.grad_norm:.6g}"
    )
    after, target = weights(strategy), reference.weights()  # all ranks export together
    if not strategy.data_rank.leader:
        return 0.0
    # A tied parameter may be exported under other names as well, and buffers beside the parameters.
    check_names({name: each for name, each in after.items() if name in target}, target)
    return distance({name: after[name] - before[name] for name in target}, {n: target[n] - start[n] for n in target})


def _publish_error(strategy: TrainStrategy, rank: int, reference: Reference) -> float:
    step = Step(sequences=_batch(reference), loss=SFT)
    for held, exported in published(strategy, rank, [step], "shared"):
        assert held == exported, "a receiver has other weights than were exported"
        check_names({name: 0 for name in held if name in reference.parameters}, reference.parameters)
    return 0.0


def _export_error(strategy: TrainStrategy, folder: Path) -> float:
    strategy.export_model(folder)
    stored = StoredModel(str(folder))
    error = _outputs_error(strategy, Reference(stored, "causal_lm"))
    if error > ROUNDING:
        _check_padding_row(stored.module, folder)
    return error


def _check_padding_row(module: Any, folder: Path) -> None:
    """Raise `AssertionError` if transformers has set the padding row of the embedding to zeros while loading it."""
    from safetensors.torch import load_file

    embedding = module.get_input_embeddings()
    name = next(name for name, each in module.named_parameters() if each is embedding.weight)
    (file,) = folder.glob("*.safetensors")
    stored_VD, row = load_file(file)[name], embedding.padding_idx
    assert row is None or torch.equal(embedding.weight[row], stored_VD[row]), (
        f"transformers sets the padding row of {name} to zeros when it loads the export, whose files have others"
    )


def _lora_error(rank: int, case: Case, folder: Path) -> float:
    """Error of the merged export after two steps of the adapters of all linear layers."""
    adapted = case.with_(model=replace(case.model, lora=LORA), training=ONE_STEP)
    step = Step(sequences=make_batch(vocabulary(case.model)), loss=SFT)
    with built(adapted, rank) as strategy:
        for _ in range(2):
            take_step(strategy, step)
        before, after = Reference(StoredModel(case.model.path), "causal_lm").weights(), weights(strategy)
        check_names({name: each for name, each in after.items() if name in before}, before)
        assert any(not np.array_equal(before[name], after[name]) for name in before), "two steps changed no weight"
        return _export_error(strategy, folder)


# -- engines -----------------------------------------------------------------------------------------------------------


def engine_row(rank: int, setup: Setup) -> Row:
    """Columns `decode` and `publish` of an engine.

    `transformers`: by how much transformers' own decoding of the same tokens differs from its pass over the whole
    sequence, if the engine's logprobs differ by more than rounding.
    """
    spec = setup.model
    oracle = Oracle(StoredModel(spec.path))
    requests = _requests(min(vocabulary(spec), NUM_BYTES))
    engine = None
    row: Row = {}
    try:
        engine = Engine(setup)
        engine.start()
        row["decode"] = _decode_error(row, oracle, requests, engine)
        weights = moved(oracle.weights() | dict(router_buffers(oracle.model.module)), 1)
        row["publish"] = _tried(lambda: _update_error(row, oracle, requests, engine, weights))
    except Exception as error:  # engines fail in any way on architectures or devices that they do not support
        row = row if "decode" in row else {"start": reason(error)}
    finally:
        if engine is not None:
            engine.close()
    return row


def _requests(vocab_size: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(5)
    return [ask(rng.integers(3, vocab_size, length), max_new_tokens=NEW_TOKENS) for length in LENGTHS]


def _update_error(
    row: Row, oracle: Oracle, requests: list[GenerateRequest], engine: Engine, weights: Mapping[str, torch.Tensor]
) -> float:
    receipt = engine.publish(weights)
    expected = {name: digest(each) for name, each in weights.items()}
    wrong = sorted(name for name in expected if receipt.digests.get(name) != expected[name])
    assert not wrong, f"the engine's receipt has another digest than that of the sent {wrong[0]} ({len(wrong)} such)"
    oracle.take(weights)
    for name, buffer in router_buffers(oracle.model.module):
        buffer.copy_(weights[name])
    return _decode_error(row, oracle, requests, engine)


def _decode_error(row: Row, oracle: Oracle, requests: list[GenerateRequest], engine: Engine) -> float:
    """Largest difference of the engine's logprobs; sets `transformers` in the row if rounding does not explain it."""
    error = gap = 0.0
    for request, completion in zip(requests, engine.generate(*requests), strict=True):
        output = completion.outputs[0]
        expected = oracle.logprobs(request.prompt_ids, output.token_ids)
        error = max(error, float(np.abs(output.logprobs - expected).max()))
        if error > ROUNDING:
            decoded = _decoded(oracle.model.module, request.prompt_ids, output.token_ids)
            gap = max(gap, float(np.abs(decoded - expected).max()))
    if gap:
        row["transformers"] = max(gap, row.get("transformers", 0.0))
    return error


def _decoded(model: Any, prompt: TokenIds, response: TokenIds) -> Floats:
    """Logprobs of the response by transformers' `generate`, which is made to choose these tokens."""
    length = len(prompt)

    def only_response(tokens_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        forced_1V = torch.full_like(scores_1V, -torch.inf)
        forced_1V[0, int(response[tokens_1L.shape[1] - length])] = 0.0
        return forced_1V

    made = model.generate(
        torch.from_numpy(prompt)[None],
        do_sample=False,
        eos_token_id=None,
        max_new_tokens=len(response),
        logits_processor=[only_response],
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows = log_softmax(torch.cat(list(made.logits)).double().numpy())
    return np.asarray(rows[np.arange(len(response)), response], dtype=np.float32)


# -- facts of transformers ---------------------------------------------------------------------------------------------


def fact_row(rank: int, spec: ModelSpec) -> Row:
    """Facts about the model type that only a pass shows.

    `padded`: why the type cannot be computed without padding. `positions`: true if it looks positions up in a table.
    `untrained`: parameters without a gradient, with `*` for the number of a layer.
    """
    from roll_modeling.backbone import Backbone
    from roll_modeling.model import load_model

    row: Row = {}
    backbone = Backbone(load_model(spec))
    if not backbone.flat:
        row["padded"] = _shortened(backbone.why_padded)
    model = StoredModel(spec.path)
    reference = Reference(model, "causal_lm")
    gradient = reference.gradient(make_batch(vocabulary(spec)), SFT)
    without = {re.sub(r"\.\d+\.", ".*.", name) for name in reference.parameters.keys() - gradient.keys()}
    if without and Path(spec.path).name not in MULTIMODAL:
        row["untrained"] = sorted(without)
    config = model.module.config
    key = next((each for each in POSITIONS if isinstance(getattr(config, each, None), int)), None)
    limit = getattr(config, key) if key else 0
    if key and _fails(model, limit + 1) and not _fails(model, limit):
        row["positions"] = getattr(type(config)(), key)
    return row


def config_facts(model_types: Sequence[str] = ()) -> dict[str, Row]:
    """What transformers' classes say about these types, or about all that are language models or have a classifier.

    `builds`: the kinds of models that an auto class builds. `experts` and `window`: the default number of experts, and
    of tokens in a sliding window, if any. `fields`: config keys by the types of their values, as in the annotations;
    empty for a key that takes any value.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    mappings = {
        "text": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        "classifier": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }
    found: dict[str, Row] = {}
    for model_type in model_types or sorted(CONFIG_MAPPING):
        config = CONFIG_MAPPING[model_type]
        builds = [kind for kind, mapping in mappings.items() if config in mapping]
        if builds:
            row = {"builds": " ".join(builds), **_experts(config), **_window(config)}
            found[model_type] = row | {"fields": _config_fields(config)}
    return found


def base_keys() -> str:
    """Config keys of every model type."""
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import RopeParameters

    names = {each.name for each in dataclasses.fields(PreTrainedConfig)} | set(RopeParameters.__annotations__)
    return " ".join(sorted(names))


def _experts(config: Any) -> Row:
    try:
        defaults = vars(config())
    except Exception:  # some need other configs
        return {}
    number = next((defaults[key] for key in NUMBER_OF_EXPERTS if defaults.get(key)), 0)
    return {"experts": number} if number else {}


def _window(config: Any) -> Row:
    default = next((each.default for each in dataclasses.fields(config) if each.name == "sliding_window"), None)
    return {"window": default} if isinstance(default, int) else {}


def _config_fields(config: Any) -> Mapping[str, str]:
    base = set(base_keys().split())
    kinds: dict[str, list[str]] = {"": sorted(set(config.attribute_map) - base)}
    for each in dataclasses.fields(config):
        if each.name not in base:
            kinds.setdefault(_kind(each.type), []).append(each.name)
    return {kind: " ".join(names) for kind, names in kinds.items() if names}


def _kind(annotation: Any) -> str:
    """Names in `architectures.TYPES` of the members of a union, joined by `|`; empty if there are others."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else None
    if members:
        names = [_kind(each) for each in members]
        return "|".join(dict.fromkeys(name for each in names for name in each.split("|"))) if all(names) else ""
    plain = typing.get_origin(annotation) or annotation
    if plain is type(None):
        return "None"
    name = getattr(plain, "__name__", "")
    return name if name in TYPES else ""


def _fails(model: TransformersModel, num_tokens: int) -> bool:
    try:
        with torch.no_grad():
            model.logits(torch.ones(num_tokens, dtype=torch.int64))
    except (IndexError, RuntimeError):
        return True
    return False


# -- results -----------------------------------------------------------------------------------------------------------


def rounded(value: float) -> float:
    """Keep two digits: further ones depend on the machine."""
    return float(f"{value:.1e}")


def reason(error: BaseException | str) -> str:
    """The message of an error, or the last line of its traceback; with its class if it is not of this project."""
    if isinstance(error, BaseException):
        if (isinstance(error, EngineDiedError) or LOGGED.search(str(error))) and (printed := _last_printed()):
            error = printed
        else:
            error = str(error) if isinstance(error, (RollError, AssertionError)) else one_line(error)
    if (match := NOT_IMPLEMENTED.search(error)) and (failure := _import_failure(match["architecture"])):
        return _shortened(failure)
    # Both engines list their architectures in this message.
    return _shortened(re.sub(r"(not supported for now)\..*", r"\1", NOISE.sub("", " ".join(error.split()))))


def on_a_cpu(text: str) -> str:
    """The reason of an engine that is made for accelerators, marked unless it holds on every device."""
    return text if DEVICE_INDEPENDENT.search(text) else f"{ON_A_CPU}{text}"


def _last_printed() -> str:
    """The last exception in the output of this rank, which its engine's processes share; empty if there is none."""
    output = Path("/proc/self/fd/1")
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    return last_exception(text)


def _import_failure(architecture: str) -> str:
    """Why SGLang cannot import its module of this class; empty if it has none, or can."""
    for file in Path(importlib.import_module("sglang.srt.models").__path__[0]).glob("*.py"):
        if re.search(rf"^class {architecture}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            try:
                importlib.import_module(f"sglang.srt.models.{file.stem}")
            except Exception as error:  # SGLang ignores any
                return f"SGLang cannot import {file.name}: {one_line(error).partition(' (/')[0]}"
    return ""


def last_exception(text: str) -> str:
    """The last exception of the tracebacks in a log; empty if there is none."""
    found = deque(PRINTED.finditer(text), maxlen=1)
    for match in found:
        file, line, code, error = match["file"], match["line"], match["code"], match["error"]
        return error or f"AssertionError: {code.strip().removeprefix('assert ')} ({file} {line})"
    return ""


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


def _tried(measure: Callable[[], float]) -> float | str:
    """Error of a measurement as it is, or the reason why it failed."""
    try:
        return measure()
    except Exception as error:  # any failure of an architecture is a result
        return reason(error)


def _largest(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    check_names(found, expected)
    return max(float(np.abs(found[name] - each).max()) for name, each in expected.items() if len(each))
