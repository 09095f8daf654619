"""Incremental encoding with the chat templates of model families: several turns, tools, reasoning, cut replies."""

from __future__ import annotations

import json
import string
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from roll_core.data.encode import Encoder, encode_prompts, encode_sft
from roll_core.data.rows import Rows, messages_of
from roll_core.data.templates import JinjaTemplate
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat
from roll_testing.errors import raises_error
from shared_tests.chat_templates import FAMILIES, Family

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call]
WITH_THOUGHTS = [name for name, family in FAMILIES.items() if family.thought]
OPENING = [{"role": "user", "content": "1 + 2?"}]


@cache
def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    config = TokenizerConfig(kind="char", alphabet=string.printable + "äß")
    tokenizer = make_tokenizer(config, [], Path(mkdtemp()), control_tokens=family.special)
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in family.ordinary])
    tokenizer.eos_token = family.end
    tokenizer.chat_template = family.template
    return tokenizer


def encoder(name: str, **options: Any) -> tuple[ChatEncoder, Family, Any]:
    tokenizer = tokenizer_of(name)
    return ChatEncoder(tokenizer, DataArguments(), where="custom_envs.test", **options), FAMILIES[name], tokenizer


def ids_of(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def text_of(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist()))


def check_prefix(extended: EncodedChat | None, chat: EncodedChat, reply: Any) -> EncodedChat:
    assert extended is not None
    known = np.concatenate([chat.ids, reply])
    assert extended.ids[: len(known)].tolist() == known.tolist()
    return extended


def result(chats: ChatEncoder, reply: Any, chat: EncodedChat) -> list[dict[str, str]]:
    (call,) = chats.parse(reply, chat).tool_calls
    return [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "3"}]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_of_tool_calls_is_found(name: str) -> None:
    chats, family, _ = encoder(name)
    assert chats.tool_format == family.format


@pytest.mark.parametrize("name", [each for each in FAMILIES if each not in ("gpt-oss", "glm")])
@pytest.mark.parametrize("system", [False, True])
def test_three_turns_of_text(name: str, system: bool) -> None:
    chats, family, tokenizer = encoder(name)
    messages = [*([{"role": "system", "content": "Be short."}] if system and name != "qwen3.5" else []), *OPENING]
    chat = chats.encode(messages)
    for number in ("3", "4"):
        closing = "\n</think>\n\n" if name == "qwen3.5" else " " if name == "mistral" else ""
        reply = ids_of(tokenizer, f"{closing}{number}{family.end}")
        question = [{"role": "user", "content": "And then?"}]
        extended = chats.extend(chat, reply, question)
        if name == "qwen3.5":  # its template removes the empty reasoning block, which the prompt opened
            assert extended is None
            return
        messages += [{"role": "assistant", "content": number}, *question]
        chat = check_prefix(extended, chat, reply)
        assert chat.text == chats.encode(messages).text == text_of(tokenizer, chat.ids)


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_tool_turns_keep_the_sampled_tokens(name: str, other: bool, thinks: bool) -> None:
    chats, family, tokenizer = encoder(name)
    if thinks and (not family.thought or name == "deepseek"):
        pytest.skip("no reasoning, or the template removes it from the last reply")
    call = family.other_call if other else family.call
    if thinks:
        call = family.thought + call.removeprefix("\n</think>\n\n").removeprefix("</think>\n")
    chat = chats.encode(OPENING, [TOOL])
    seen = ""
    for number in range(2):
        end = family.call_end or family.end
        written = call.replace("call00000", f"call{number:05d}")
        reply = ids_of(tokenizer, written + end)
        parsed = chats.parse(reply, chat)
        assert [each["function"] for each in parsed.tool_calls] == [{"name": "add", "arguments": '{"a": 1, "b": 2}'}]
        assert (parsed.reasoning, parsed.content.strip(), parsed.error) == ("add them" if thinks else "", "", None)
        extended = chats.extend(chat, reply, result(chats, reply, chat))
        chat = check_prefix(extended, chat, reply)
        assert written + end in text_of(tokenizer, chat.ids)
        assert chat.text == chats.encode(chat.messages, [TOOL]).text
        assert text_of(tokenizer, chat.ids).startswith(seen)
        seen = text_of(tokenizer, chat.ids)


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_reasoning_that_the_template_removes_forks_or_is_kept(name: str) -> None:
    question = [{"role": "user", "content": "And then?"}]
    chats, family, tokenizer = encoder(name)
    chat = chats.encode(OPENING)
    if name == "gpt-oss":
        reply = ids_of(tokenizer, f"{family.thought}<|channel|>final<|message|>3{family.end}")
    else:
        reply = ids_of(tokenizer, f"{family.thought}3{family.end}")
    extended = chats.extend(chat, reply, question)
    if name == "glm":  # this structure keeps all reasoning
        check_prefix(extended, chat, reply)
    else:
        assert extended is None
    message = chats.reply(reply, chat)
    forked = chats.encode([*OPENING, message, *question])
    assert ("add them" in forked.text) == (name == "glm")
    keeps, _, _ = encoder(name, thinking="keep")
    kept = keeps.extend(chat, reply, question)
    if name == "gpt-oss":  # the template ends earlier replies by another token than the model
        assert kept is None
        return
    kept = check_prefix(kept, chat, reply)
    assert "add them" in text_of(tokenizer, kept.ids)
    second = ids_of(tokenizer, f"{family.thought}4{family.end}")
    third = check_prefix(keeps.extend(kept, second, question), kept, second)
    assert text_of(tokenizer, third.ids).count("add them") == 2


@pytest.mark.parametrize("name", [each for each in WITH_THOUGHTS if each != "gpt-oss"])
def test_reasoning_can_be_stripped(name: str) -> None:
    question = [{"role": "user", "content": "And then?"}]
    chats, family, tokenizer = encoder(name, thinking="strip")
    chat = chats.encode(OPENING)
    reply = ids_of(tokenizer, f"{family.thought}3{family.end}")
    assert chats.extend(chat, reply, question) is None
    forked = chats.encode([*OPENING, chats.reply(reply, chat), *question])
    assert "add them" not in forked.text
    assert "3" in forked.text


def test_qwen3_keeps_reasoning_in_a_tool_loop_and_forks_after() -> None:
    chats, family, tokenizer = encoder("qwen3")
    chat = chats.encode(OPENING, [TOOL])
    call = ids_of(tokenizer, family.thought + family.call + family.end)
    chat = check_prefix(chats.extend(chat, call, result(chats, call, chat)), chat, call)
    answer = ids_of(tokenizer, f"{family.thought}3{family.end}")
    assert chats.extend(chat, answer, [{"role": "user", "content": "And then?"}]) is None
    keeps, _, _ = encoder("qwen3", thinking="keep")
    chat = keeps.encode(OPENING, [TOOL])
    chat = check_prefix(keeps.extend(chat, call, result(keeps, call, chat)), chat, call)
    chat = check_prefix(keeps.extend(chat, answer, [{"role": "user", "content": "And then?"}]), chat, answer)
    assert text_of(tokenizer, chat.ids).count("add them") == 2


@pytest.mark.parametrize("name", [each for each in FAMILIES if each not in ("gpt-oss", "qwen3.5", "glm")])
@pytest.mark.parametrize("text", ["", "3", "3 \n"])
@pytest.mark.parametrize("ended", [False, True])
def test_empty_and_cut_replies_are_closed_by_the_template(name: str, text: str, ended: bool) -> None:
    chats, family, tokenizer = encoder(name)
    chat = chats.encode(OPENING)
    reply = ids_of(tokenizer, text + (family.end if ended else ""))
    if not len(reply):
        return
    extended = check_prefix(chats.extend(chat, reply, [{"role": "user", "content": "And?"}]), chat, reply)
    assert text_of(tokenizer, extended.ids).count(family.end) == chat.text.count(family.end) + (
        2 if family.end in text_of(tokenizer, extended.ids).rpartition("And?")[2] else 1
    )


def test_another_end_than_the_template_s_forks() -> None:
    chats, _, tokenizer = encoder("qwen3")
    chat = chats.encode(OPENING)
    assert chats.extend(chat, ids_of(tokenizer, "3<|endoftext|>"), [{"role": "user", "content": "And?"}]) is None


def test_a_system_message_that_moves_to_the_front_forks() -> None:
    chats, family, tokenizer = encoder("deepseek")
    chat = chats.encode(OPENING)
    reply = ids_of(tokenizer, "3" + family.end)
    assert chats.extend(chat, reply, [{"role": "system", "content": "Be short."}, *OPENING]) is None


def test_tools_that_move_to_the_last_question_fork() -> None:
    chats, family, tokenizer = encoder("mistral")
    chat = chats.encode(OPENING, [TOOL])
    assert chats.extend(chat, ids_of(tokenizer, " 3" + family.end), OPENING) is None


def test_special_tokens_of_reasoning_are_part_of_a_reply() -> None:
    """As Magistral has them."""
    config = TokenizerConfig(kind="char", alphabet=string.printable)
    special = (*FAMILIES["mistral"].special, "[THINK]", "[/THINK]")
    tokenizer = make_tokenizer(config, [], Path(mkdtemp()), control_tokens=special)
    tokenizer.eos_token, tokenizer.chat_template = "</s>", FAMILIES["mistral"].template
    chats = ChatEncoder(tokenizer, DataArguments(), where="custom_envs.test", thinking="keep")
    chat = chats.encode(OPENING)
    reply = ids_of(tokenizer, "[THINK]2+1[/THINK]3</s>")
    parsed = chats.parse(reply, chat)
    assert (parsed.reasoning, parsed.content, parsed.error) == ("2+1", "3", None)
    assert chats.reply(reply, chat)["content"] == "[THINK]\n2+1\n[/THINK]\n\n3"
    ended = chats.parse(ids_of(tokenizer, "[THINK]2+1[/THINK]</s>"), chat)
    assert (ended.reasoning, ended.content, ended.error) == ("2+1", "", None)


def test_messages_that_the_template_refuses_fork_and_then_fail() -> None:
    chats, family, tokenizer = encoder("gemma")
    chat = chats.encode(OPENING)
    reply, answer = ids_of(tokenizer, "3" + family.end), [{"role": "tool", "content": "3"}]
    assert chats.extend(chat, reply, [*answer, *answer]) is None
    with pytest.raises(DataError):
        chats.encode([*OPENING, chats.reply(reply, chat), *answer, *answer])


PIECES = ["3", " ", "\n", "add", "<think>", "</think>", "{", '"name"', "ä"]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(FAMILIES)), thinking=st.sampled_from(["template", "keep", "strip"]))
def test_an_extension_is_the_template_s_own_prompt(data: Any, name: str, thinking: Any) -> None:
    """Whatever the model says: the recorded tokens, then exactly what the template writes after the reply."""
    chats, family, tokenizer = encoder(name, thinking=thinking)
    tools = [TOOL] if family.call and data.draw(st.booleans()) else []
    chat = chats.encode(OPENING, tools)
    for _ in range(data.draw(st.integers(1, 3))):
        calls = [family.call, family.other_call] if family.call else []
        pieces = st.lists(st.sampled_from([*PIECES, *calls, family.thought, *family.special]), max_size=5)
        text = "".join(data.draw(pieces)) + data.draw(st.sampled_from([family.end, family.call_end, ""]))
        reply = ids_of(tokenizer, text)
        if not len(reply):
            return
        parsed = chats.parse(reply, chat)
        following = [{"role": "tool", "tool_call_id": each["id"], "content": "3"} for each in parsed.tool_calls] or [
            {"role": "user", "content": data.draw(st.sampled_from(["And?", " And ", ""]))}
        ]
        extended = chats.extend(chat, reply, following)
        if extended is None:
            return
        check_prefix(extended, chat, reply)
        rest = text_of(tokenizer, extended.ids[len(chat.ids) + len(reply) :])
        whole = chats.encode(extended.messages, tools)
        assert whole.text == extended.text
        assert extended.text.endswith(rest)
        if thinking == "template":
            assert extended.text.startswith(chat.text)
        if tokenizer.decode(chat.ids.tolist()) == chat.text and extended.text.startswith(chat.text + text):
            assert extended.ids.tolist() == whole.ids.tolist()
        chat = extended


def called(arguments: object) -> list[dict[str, Any]]:
    """A question, a call, its result and the answer, as rows of a data set have them."""
    function = {"name": "add", "arguments": arguments}
    return [
        *OPENING,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("arguments", [{"a": 1, "b": 2}, '{"a": 1, "b": 2}'])
def test_rows_with_tool_calls_train_calls_and_answers(name: str, arguments: object) -> None:
    chats, family, tokenizer = encoder(name)
    # DeepSeek's template renders calls, but describes no tools.
    tools = [] if name == "deepseek" else [TOOL]
    data = DataArguments(file_name="rows.jsonl", messages="messages", tools="tools")
    rows = Rows([("rows.jsonl", [{"messages": called(arguments), "tools": json.dumps(tools)}])], data)
    (sequence,), _ = encode_sft(rows, data, tokenizer, prompt_length=9999, response_length=9999)
    # gpt-oss's template ends an answer in the history by `<|end|>`, and the run adds the end of the sequence.
    trained = text_of(tokenizer, sequence.tokens[sequence.loss_mask]).replace("<|end|><|return|>", "<|return|>")
    end = family.call_end or family.end
    assert trained.startswith(family.call + end)
    assert trained.endswith(("It is 3" + family.end, "It is 3" + tokenizer.eos_token))
    # Each reply follows the prompt that generation would give.
    messages = messages_of(rows[0], data, rows, response=True)
    for number, at in enumerate((1, 3)):
        prompt = chats.encode(messages[:at], tools)
        begin = int(np.flatnonzero(np.diff(sequence.loss_mask, prepend=False))[2 * number])
        assert text_of(tokenizer, sequence.tokens[:begin]) == prompt.text


SPOKEN = ("{end}", "a{end}b", "{end}b", "b{end}", "<eos>", "a<eos>b", "")


@pytest.mark.parametrize("eos", ["", "<eos>"])
@pytest.mark.parametrize("name", [each for each in FAMILIES if each != "gpt-oss"])
def test_special_tokens_in_a_reply_do_not_end_its_turn(name: str, eos: str) -> None:
    """The segments are those of a reply of letters, with other letters; also of an empty reply."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    tokenizer.eos_token = eos or family.end
    try:
        template = JinjaTemplate(tokenizer)
        for follows in ([], [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]):

            def segments(content: str) -> list[tuple[str, bool, bool]] | None:
                messages = [*OPENING, {"role": "assistant", "content": content}, *follows]  # noqa: B023
                try:
                    found = template.segments(messages)
                except DataError:  # Qwen 3 with a token that its template does not know
                    return None
                return [(each.text, each.written, each.ends) for each in found]

            if (plain := segments("zyx")) is None:
                continue
            for spoken in (each.format(end=family.end) for each in SPOKEN):
                if spoken or name != "glm":  # which writes a line break before other replies
                    assert segments(spoken) == [(text.replace("zyx", spoken), *rest) for text, *rest in plain]
    finally:
        tokenizer.eos_token = family.end


@pytest.mark.parametrize("thinks", [None, True, False])
def test_chat_template_kwargs_reach_rows_and_turns(thinks: bool | None) -> None:
    tokenizer, arguments = tokenizer_of("qwen3"), {} if thinks is None else {"enable_thinking": thinks}
    replied = [*OPENING, {"role": "assistant", "content": "3"}]
    data = DataArguments(messages="messages", chat_template_kwargs=arguments)
    theirs = tokenizer.apply_chat_template(OPENING, add_generation_prompt=True, return_dict=False, **arguments)
    whole = tokenizer.apply_chat_template(replied, return_dict=False, **arguments)
    answered, asked = (Rows([("rows.jsonl", [{"messages": messages}])], data) for messages in (replied, OPENING))
    ((sequence,), _) = encode_sft(answered, data, tokenizer, prompt_length=999, response_length=999)
    assert sequence.tokens.tolist() == whole[: len(sequence.tokens)]
    # With an empty block of reasoning in the prompt, only the reply after it is trained.
    assert sequence.tokens[~sequence.loss_mask].tolist() == theirs
    ((prompt,), _) = encode_prompts(asked, data, tokenizer, prompt_length=999)
    assert list(prompt.tokens) == theirs
    assert ChatEncoder(tokenizer, data, where="custom_envs.test").encode(OPENING).ids.tolist() == theirs


@pytest.mark.parametrize("template", [FAMILIES["qwen3"].template, None])
def test_unread_chat_template_kwargs_are_refused(template: str | None, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path)
    tokenizer.chat_template = template
    with raises_error(DataError, "enable_thinkin"):
        Encoder(tokenizer, DataArguments(chat_template_kwargs={"enable_thinkin": False}))
