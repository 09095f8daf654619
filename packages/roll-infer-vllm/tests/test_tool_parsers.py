"""Our parsers of tool calls and reasoning against those of vLLM's server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from shared_tests.tool_calls import MARKERS, TOOLS, EngineParserTests

pytest.importorskip("vllm")
PARSERS = {"deepseek": "deepseek_v3"}
"""vLLM's names where they differ from ours."""


class TestToolParsersOfVllm(EngineParserTests):
    reads_cut_calls = {"qwen3_coder", "mistral", "glm45"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("tokenizer")
        self.tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], folder, control_tokens=MARKERS)

    def engine_reply(self, format: str, text: str) -> tuple[str, list[tuple[str, Any]]] | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        if format == "mistral_list":
            return None
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)
        parser = ToolParserManager.get_tool_parser(PARSERS.get(format, format))(self.tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in found.tool_calls]
        return found.content or "", calls

    def engine_reasoning(self, text: str, *, open: bool) -> tuple[str, str]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager

        if not open and "<think>" not in text:
            pytest.skip("a reply without reasoning is reasoning for vLLM's qwen3")
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m")
        parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1" if open else "qwen3")(self.tokenizer)
        reasoning, content = parser.extract_reasoning(text, request)
        return reasoning or "", content or ""
