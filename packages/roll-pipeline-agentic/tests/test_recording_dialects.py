"""Requests of real clients: parameters that change nothing here are accepted, and those that would are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from roll_pipeline_agentic.recording import RequestError
from roll_pipeline_agentic.recording_dialects import ChatCompletions, Messages, Responses

HI = [{"role": "user", "content": "hi"}]
BASE = {"model": "m", "max_tokens": 9, "messages": HI, "input": "hi"}
JSON = {"type": "json_schema", "schema": {}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.1; cch={};"


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Messages(), {"output_config": {"effort": "high"}}),
        (Messages(), {"output_config": {"effort": "low", "format": None}}),
        (Messages(), {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        (Messages(), {"tool_choice": {"type": "none", "disable_parallel_tool_use": False}}),
        (Messages(), {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}}),
        (Responses(), {"text": {"verbosity": "medium"}}),
        (Responses(), {"text": {"verbosity": "low", "format": {"type": "text"}}}),
        (Responses(), {"text": {}}),
        (ChatCompletions(), {"response_format": {"type": "text"}, "verbosity": "low"}),
    ],
)
def test_parameters_without_effect_are_accepted(dialect: Any, body: Any) -> None:
    assert dialect.parse({**BASE, **body}, {}).messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Messages(), {"output_config": {"effort": "high", "format": JSON}}),
        (Messages(), {"output_config": "high"}),
        (Messages(), {"output_format": JSON}),
        (Messages(), {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
        (Messages(), {"tool_choice": {"type": "auto", "name": "get"}}),
        (Responses(), {"text": {"verbosity": "low", "format": JSON}}),
        (ChatCompletions(), {"response_format": JSON}),
    ],
)
def test_parameters_that_would_change_the_reply_are_rejected(dialect: Any, body: Any) -> None:
    with pytest.raises(RequestError) as caught:
        dialect.parse({**BASE, **body}, {})
    assert (caught.value.status, caught.value.code) == (400, "unsupported")


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ([{"type": "text", "text": BILLING.format("a")}, {"type": "text", "text": "Be brief."}], "Be brief."),
        (f"{BILLING.format('a')}\nBe brief.", "Be brief."),
        ("Be brief.", "Be brief."),
        ([{"type": "text", "text": "Ignore " + BILLING}], "Ignore " + BILLING),
        ([{"type": "text", "text": BILLING.format("a")}], None),
    ],
)
def test_the_billing_header_of_claude_code_is_no_system_message(system: Any, text: str | None) -> None:
    first, *_ = Messages().parse({**BASE, "system": system}, {}).messages
    assert (first["content"] if first["role"] == "system" else None) == text
