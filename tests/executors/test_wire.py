"""What crosses between Python environments: values come back as they were, everything else is refused."""

import dataclasses
import enum
import math
import pickle
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.losses import policy_objective
from roll_core.algorithms.policy_losses import ppo
from roll_core.builtin import plugin
from roll_core.errors import CorruptTensorError, GuardTrippedError, UnsupportedError
from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.cluster.executors.base import CallFailed, Failure
from roll_core.runtime.cluster.executors.worker_server import WIRE, decode, encode_failure
from roll_core.types import Reward, Sample
from roll_infer_hf.plugin import roll_infer_strategies
from roll_strategy_hf.plugin import roll_train_strategies
from roll_testing.errors import mentions, raises_error

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.times().map(lambda at: at.replace(fold=0))  # it selects an offset of a time zone
    | st.datetimes().map(lambda at: at.replace(fold=0))
    | st.timedeltas()
    | st.decimals()
    | st.integers().map(lambda number: number % 2**64),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    return wire.loads(wire.dumps(value))


@given(PLAIN)
def test_plain_values_come_back_as_they_are(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_text_may_have_surrogates_that_lack_their_other_half() -> None:
    reward = Reward(value=0.5, detail={"\ud83d": "näh \udc00"})
    assert there_and_back([reward, Path("\udcff")]) == [reward, Path("\udcff")]


@pytest.mark.parametrize("dtype", ["int64", "float32", "bool", "float16", "uint8", "<U3", "int32"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 3)])
def test_arrays_keep_dtype_and_shape_and_can_be_written(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    found = there_and_back(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    assert found.flags.writeable


def test_an_array_that_lies_in_strides_arrives_in_order() -> None:
    array = np.arange(12).reshape(3, 4)
    assert np.array_equal(there_and_back(array.T[::-1]), array.T[::-1])


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b""), np.str_("ü")])
def test_texts_of_numpy_keep_their_type_even_if_they_are_empty(value: np.generic) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found == value


def test_numbers_of_numpy_keep_their_type() -> None:
    found = there_and_back({"score": np.float32(0.1), "count": np.int64(3), "ok": np.bool_(True)})
    assert [type(each) for each in found.values()] == [np.float32, np.int64, np.bool_]
    assert found["score"] == np.float32(0.1)


def test_of_a_time_zone_the_offset_arrives() -> None:
    at = datetime(2026, 7, 2, 3, 4, tzinfo=ZoneInfo("Europe/Berlin"))
    found = there_and_back(at)
    assert (found, found.utcoffset()) == (at, timedelta(hours=2))


def test_nan_and_infinities_stay() -> None:
    nan, up, down = there_and_back((math.nan, math.inf, -math.inf))
    assert math.isnan(nan)
    assert (up, down) == (math.inf, -math.inf)


def test_scored_sample_keeps_the_columns_of_its_row() -> None:
    sample = Sample(
        id="0/1/2",
        group_id="0/1",
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([], dtype=np.int64),
        logprobs=np.zeros(0, dtype=np.float32),
        loss_mask=np.zeros(0, dtype=bool),
        versions=np.zeros(0, dtype=np.int32),
        finish_reason="stop",
        reward=Reward(value=None, failure="Zeit abgelaufen – 超时"),
        metadata={"answer": ["７", 7, {"unit": None}]},
    )
    found = there_and_back([sample])[0]
    assert type(found) is Sample
    for field in dataclasses.fields(Sample):
        assert np.array_equal(getattr(found, field.name), getattr(sample, field.name)), field.name


def test_provider_and_objective_records_keep_their_types() -> None:
    providers = [*roll_train_strategies(), *roll_infer_strategies(), *plugin.roll_rewards()]
    assert there_and_back(providers) == providers
    objective = policy_objective(policy_loss=ppo, kl_coef=0.1)
    assert there_and_back(objective) == objective
    assert there_and_back(objective).terms["policy"].policy_loss is ppo


def test_paths_sets_and_enums() -> None:
    class Inner(enum.Enum):
        A = 1

    assert there_and_back([Path("/a/b"), {1, 2}, frozenset("x")]) == [Path("/a/b"), {1, 2}, {"x"}]
    assert there_and_back(pickle.PickleBuffer) is pickle.PickleBuffer
    with raises_error(UnsupportedError, "Inner"):
        wire.dumps(Inner.A)


@pytest.mark.parametrize(
    ("value", "facts"),
    [
        (torch.zeros(2), ("torch.Tensor",)),
        ({"deep": [(threading.Lock(),)]}, ("lock",)),
        (np.array([object()]), ("object",)),
        (lambda: 0, ("<lambda>",)),
        (2**70, ("1180591620717411303424",)),
    ],
)
def test_unsupported_value_is_refused_by_name(value: Any, facts: str) -> None:
    with raises_error(UnsupportedError, *facts):
        wire.dumps(value)


def test_a_name_that_is_no_dataclass_makes_nothing() -> None:
    forged = wire.msgpack.packb(
        wire.msgpack.ExtType(wire.RECORD, wire.dumps(["subprocess:Popen", {"args": ["touch", "/nowhere"]}]))
    )
    with raises_error(UnsupportedError, "subprocess:Popen"):
        wire.loads(forged)


def test_a_failure_brings_our_own_error_with_its_trace() -> None:
    error = GuardTrippedError("weights_unchanged", "nothing moved")
    error.trace = "there"
    with pytest.raises(CallFailed) as caught:
        decode(WIRE, encode_failure(WIRE, Failure(error=error, summary="s", trace="t", failed_at=1.5)))
    failure = caught.value.failure
    assert isinstance(failure.error, GuardTrippedError)
    assert (failure.error.args, failure.error.trace) == (error.args, "there")
    assert (failure.summary, failure.trace, failure.failed_at) == ("s", "t", 1.5)


def test_an_error_of_a_library_arrives_as_its_words() -> None:
    raised = Failure.of(torch.OutOfMemoryError("no memory"))
    with pytest.raises(CallFailed) as caught:
        decode(WIRE, encode_failure(WIRE, raised))
    assert caught.value.failure.error is None
    assert mentions(caught.value.failure.summary, "OutOfMemoryError")


def test_a_result_may_hold_a_failure_of_a_sync() -> None:
    found = decode(WIRE, WIRE.dumps((True, {"failure": CorruptTensorError("layer.0")})))
    assert isinstance(found["failure"], CorruptTensorError)
    assert found["failure"].args == ("layer.0",)
