"""The contract of infer strategies. Without SGLang only what needs none of it runs."""

from __future__ import annotations

from sglang_on_a_cpu import ON_A_CPU, need_image_processors

from roll_testing import InferStrategyConformance


class TestSglang(InferStrategyConformance):
    name = "sglang"
    variants = {"default": ON_A_CPU}  # noqa: RUF012
    tight_config = {"max_total_tokens": 1024}  # noqa: RUF012
    adapter_config = {"enable_lora": True}  # noqa: RUF012
    timeout_s = 300.0

    def image_model(self, folder):
        need_image_processors()
        return super().image_model(folder)

    def processes(self, strategy):
        return strategy._server.processes()
