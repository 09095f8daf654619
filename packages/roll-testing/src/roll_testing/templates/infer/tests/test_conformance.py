"""The conformance tests of inference engines: logprobs, sampling, ends, weights and lifecycle."""

from roll_testing import InferStrategyConformance


class TestAcmeEngine(InferStrategyConformance):
    """`acme` compared with transformers, and with `hf_train` on the same weights."""

    name = "acme"
