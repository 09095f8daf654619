"""`deterministic: true` requests deterministic kernels while a training role computes, and only then."""

import threading
from types import SimpleNamespace

import pytest
import torch

from roll_core.errors import UnsupportedError
from roll_core.runtime.workers.train import BatchLimits, TrainWorker
from roll_core.spec.train import WantedOutputs
from roll_core.types import Totals
from roll_testing.errors import raises_error
from shared_tests.deterministic_cuda import cuda_rule

TOTALS = Totals(tokens=0, sequences=0, rollouts=0, groups=0, max_length=0)


class RecordingStrategy:
    """Records if deterministic kernels are requested in each call."""

    microbatch_multiple = 1

    def __init__(self, act=lambda: None):
        self.act, self.seen = act, {}

    def __getattr__(self, name):
        def call(*args):
            self.seen[name] = torch.are_deterministic_algorithms_enabled()
            self.act()
            return [] if name != "optimizer_step" else SimpleNamespace()

        return call


def worker(strategy, deterministic=True):
    made = object.__new__(TrainWorker)
    made.role, made.strategy, made.deterministic = "actor_train", strategy, deterministic
    made.limits = BatchLimits(train_sequences=2, infer_sequences=2)
    made.mesh = SimpleNamespace(device="cpu")
    return made


@pytest.mark.parametrize("deterministic", [True, False])
def test_passes_and_steps_request_deterministic_kernels(deterministic):
    strategy = RecordingStrategy()
    made = worker(strategy, deterministic)
    made.update([], lambda *_: None, TOTALS)
    made.score([], WantedOutputs(logprobs=True))
    assert strategy.seen == dict.fromkeys(("forward_backward", "optimizer_step", "forward_all"), deterministic)
    assert not torch.are_deterministic_algorithms_enabled()


def test_code_between_steps_is_not_refused_a_kernel():
    made = worker(RecordingStrategy())
    made.update([], lambda *_: None, TOTALS)
    with cuda_rule():
        assert torch.ones(3).cumsum(0).tolist() == [1, 2, 3]


def test_the_request_ends_with_the_last_of_two_threads():
    begun, end = threading.Event(), threading.Event()

    def wait():
        begun.set()
        end.wait(20)

    long = threading.Thread(target=worker(RecordingStrategy(wait)).score, args=([], WantedOutputs(logprobs=True)))
    long.start()
    assert begun.wait(20)
    worker(RecordingStrategy()).score([], WantedOutputs(logprobs=True))
    during = torch.are_deterministic_algorithms_enabled()
    end.set()
    long.join(20)
    assert during
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_refused_operator_names_role_and_setting():
    made = worker(RecordingStrategy(lambda: torch.ones(3).cumsum(0)))
    with cuda_rule(), raises_error(UnsupportedError, "actor_train", "cumsum_cuda", "deterministic"):
        made.update([], lambda *_: None, TOTALS)
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_of_a_step_pass_unchanged():
    error = RuntimeError("CUDA out of memory")

    def fail():
        raise error

    with pytest.raises(RuntimeError) as caught:
        worker(RecordingStrategy(fail)).update([], lambda *_: None, TOTALS)
    assert caught.value is error
