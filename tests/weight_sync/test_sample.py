import torch

from roll_core.runtime.weights.transfer import sample_fingerprint


def test_small_models_are_read_completely():
    tensors = [("a", torch.zeros(1000)), ("b", torch.zeros(10).t())]
    before = sample_fingerprint(tensors)
    for at in (0, 517, 999):
        tensors[0][1][at] = 1
        assert sample_fingerprint(tensors) != before
        tensors[0][1][at] = 0
    assert sample_fingerprint(tensors) == before


def test_of_large_models_some_of_every_tensor_is_read():
    tensors = [("a", torch.zeros(1 << 20)), ("b", torch.zeros(1 << 20)), ("c", torch.zeros(3))]
    before = sample_fingerprint(tensors, sample_bytes=1 << 20)
    for _, tensor in tensors:
        tensor += 1
        assert sample_fingerprint(tensors, sample_bytes=1 << 20) != before
        tensor -= 1
    assert sample_fingerprint(tensors, sample_bytes=1 << 20) == before


def test_names_belong_to_the_fingerprint():
    tensor = torch.ones(5)
    assert sample_fingerprint([("a", tensor)]) != sample_fingerprint([("b", tensor)])


def test_strided_tensors_have_the_fingerprint_of_their_values():
    square = torch.randn(50, 50)
    assert sample_fingerprint([("w", square.t())]) == sample_fingerprint([("w", square.t().contiguous())])
