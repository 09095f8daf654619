"""Our parser of tool calls against those of vLLM's server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_pipeline_agentic.tool_calls import parse_tool_calls
from shared_tests.tool_calls import MARKERS, TOOLS, EngineParserTests

pytest.importorskip("vllm")
PARSERS = {"deepseek": "deepseek_v3"}
"""vLLM's names where they differ from ours."""


class TestToolParsersOfVllm(EngineParserTests):
    @pytest.fixture(autouse=True)
    def _tokenizer(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("tokenizer")
        self.tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], folder, control_tokens=MARKERS)

    def engine_calls(self, format: str, text: str) -> list[tuple[str, Any]] | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        if format == "mistral_list":
            return None
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)
        parser = ToolParserManager.get_tool_parser(PARSERS.get(format, format))(self.tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        return [(each.function.name, json.loads(each.function.arguments)) for each in found.tool_calls]

    @pytest.mark.parametrize(
        ("parser", "text"),
        [("deepseek_r1", "a\n</think>\n\n4"), ("deepseek_r1", "<think>a</think>4"), ("deepseek_r1", "never ends")],
    )
    def test_reasoning_is_split_as_by_vllm(self, parser: str, text: str) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager

        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m")
        theirs = ReasoningParserManager.get_reasoning_parser(parser)(self.tokenizer)
        reasoning, content = theirs.extract_reasoning(text, request)
        ours = parse_tool_calls(text, "none", reasoning_open=True)
        assert (ours.reasoning.strip(), ours.content.strip()) == ((reasoning or "").strip(), (content or "").strip())
