"""Our parsers of tool calls and reasoning against those of SGLang's server."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from sglang_on_a_cpu import STAND_INS

from shared_tests.tool_calls import TOOLS, EngineParserTests

pytest.importorskip("xgrammar")  # of SGLang, which cannot be imported before its stand-ins are there
PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "deepseek": "deepseekv3",
    "glm45": "glm45",
}
"""SGLang's names by ours."""


class TestToolParsersOfSglang(EngineParserTests):
    reads_cut_calls = {"qwen3_coder"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _stand_ins_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [*STAND_INS, *sys.path])

    def engine_reply(self, format: str, text: str) -> tuple[str, list[tuple[str, Any]]] | None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        parser = FunctionCallParser([Tool.model_validate(each) for each in TOOLS], PARSERS[format])
        if not parser.has_tool_call(text):
            return text, []
        content, found = parser.parse_non_stream(text)
        return content, [(each.name, json.loads(each.parameters)) for each in found]

    def engine_reasoning(self, text: str, *, open: bool) -> tuple[str, str]:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        parser = ReasoningParser("deepseek-r1" if open else "qwen3", stream_reasoning=False)
        reasoning, content = parser.parse_non_stream(text)
        return reasoning or "", content or ""
