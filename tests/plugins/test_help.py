"""What `help()` shows of the plugin API: the meaning of fields, and which calls have to be awaited."""

import importlib
import inspect
import pkgutil
import pydoc
import re
from dataclasses import fields, is_dataclass

import pytest

import roll_core.spec
from roll_core import types
from roll_core.spec import pipeline
from roll_core.spec.config import GeneratingArguments
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.providers import InferProvider
from roll_core.types import SamplingParams

MODULES = [
    types,
    *(importlib.import_module(f"roll_core.spec.{each.name}") for each in pkgutil.iter_modules(roll_core.spec.__path__)),
]
RECORDS = [
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__
]


def shown(cls):
    return pydoc.render_doc(cls, renderer=pydoc.plaintext)


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: each.__name__)
def test_help_shows_every_field_of_a_record(record):
    _, _, listed = inspect.getdoc(record).partition("\nFields:\n")
    assert set(re.findall(r"^(\w+): ", listed, flags=re.MULTILINE)) == {each.name for each in fields(record)}


def test_help_shows_what_fields_mean():
    role = shown(RoleSpec)
    assert "task: Task = 'causal_lm'" in role
    assert "Optimizer steps of the whole run, for roles that train: the length of the schedule." in role
    engine = shown(InferProvider)
    assert "User-facing name, used in configs and error messages." in engine  # of the base
    assert "Names of the platforms it runs on; empty means every platform." in engine


CONTRACTS = (pipeline.Run, pipeline.TrainRole, pipeline.InferRole, pipeline.RolloutBatches, pipeline.Pipeline)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda each: each.__name__)
def test_contract_marks_its_coroutines(contract):
    (sentence,) = re.findall(r"Coroutines[^:]*: ([^.]*)\.", inspect.getdoc(contract))
    found = {name for name, value in vars(contract).items() if inspect.iscoroutinefunction(value)}
    assert set(re.findall(r"`(\w+)`", sentence)) == found


def test_generating_arguments_become_sampling_parameters():
    given = GeneratingArguments(temperature=0.5, top_k=-1, stop_strings=["x"], min_new_tokens=2, seed=3)
    assert given.sampling_params(default_max_new_tokens=9) == SamplingParams(
        temperature=0.5, top_k=0, stop=("x",), min_new_tokens=2, seed=3, max_new_tokens=9
    )
    assert GeneratingArguments(max_new_tokens=4).sampling_params(default_max_new_tokens=9).max_new_tokens == 4
