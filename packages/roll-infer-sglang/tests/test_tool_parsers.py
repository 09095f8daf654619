"""Our parser of tool calls against those of SGLang's server."""

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
    @pytest.fixture(autouse=True)
    def _stand_ins_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [STAND_INS, *sys.path])

    def engine_calls(self, format: str, text: str) -> list[tuple[str, Any]] | None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        parser = FunctionCallParser([Tool.model_validate(each) for each in TOOLS], PARSERS[format])
        if not parser.has_tool_call(text):
            return []
        _, found = parser.parse_non_stream(text)
        return [(each.name, json.loads(each.parameters)) for each in found]
