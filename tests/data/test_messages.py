"""Each value of a message reaches the model, and exactly the model's own tokens are trained, in context."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roll_core.data.encode import Encoder, encode_prompts, encode_sft
from roll_core.data.rows import Rows
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_testing.errors import raises_error
from shared_tests.chat_templates import FAMILIES

MARKS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|done|>")
CHAT = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def byte_tokenizer(template: str | None, *, eos: str = "<|im_end|>", marks: tuple[str, ...] = MARKS) -> Any:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], Path(mkdtemp()), control_tokens=marks)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def family(name: str) -> Any:
    found = FAMILIES[name]
    return byte_tokenizer(found.template, eos=found.end, marks=(*found.special, *found.ordinary))


def rows_of(*chats: Any, **columns: Any) -> tuple[Rows, DataArguments]:
    data = DataArguments(file_name="rows.jsonl", messages="messages", **{key: key for key in columns})
    return Rows([("rows.jsonl", [{"messages": chat, **columns} for chat in chats])], data), data


def trained(chat: Any, tokenizer: Any, template: str = "native", **columns: Any) -> str:
    """The row's text; trained parts are in brackets."""
    rows, data = rows_of(chat, **columns)
    data = data.model_copy(update={"template": template})
    (sequence,), _ = encode_sft(rows, data, tokenizer, prompt_length=9999, response_length=9999)
    parts = groupby(zip(sequence.loss_mask.tolist(), sequence.tokens.tolist(), strict=True), key=lambda pair: pair[0])
    return "".join(
        f"⟦{text}⟧" if is_trained else text
        for is_trained, group in parts
        for text in [tokenizer.decode([token for _, token in group])]
    )


# -- several turns -----------------------------------------------------------------------------------------------------

TURN = "{{ '<|' + m.role + '|>' + m.content }}"
GENERATION = "{% if add_generation_prompt %}<|assistant|>"
ENDS_THE_CONVERSATION = (
    "{% for m in messages %}" + TURN + "<|end|>{% endfor %}" + GENERATION + "{% else %}{{ eos_token }}{% endif %}"
)
ENDS_THE_LAST_REPLY = (
    "{% for m in messages %}" + TURN + "{{ '<|done|>' if m.role == 'assistant' and loop.last and not"
    " add_generation_prompt else '<|end|>' }}{% endfor %}" + GENERATION + "{% endif %}"
)


@pytest.mark.parametrize("contents", [("A1", "Q2", "A2"), ("end", "e", "|>"), ("Q1", "assistant", "user")])
@pytest.mark.parametrize(("template", "last"), [(ENDS_THE_CONVERSATION, "<|end|>"), (ENDS_THE_LAST_REPLY, "")])
def test_every_reply_is_trained_once(template: str, last: str, contents: tuple[str, ...]) -> None:
    first, question, second = contents
    chat = [CHAT[0], *({**m, "content": text} for m, text in zip(CHAT[1:], contents, strict=True))]
    assert trained(chat, byte_tokenizer(template, eos="<|done|>")) == (
        f"<|user|>Q1<|end|><|assistant|>⟦{first}<|end|>⟧<|user|>{question}<|end|><|assistant|>⟦{second}{last}<|done|>⟧"
    )


def test_a_reply_that_follows_a_reply_is_trained_once() -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": "B"}, *CHAT[2:]]
    assert trained(chat, byte_tokenizer(ENDS_THE_CONVERSATION, eos="<|done|>")) == (
        "<|user|>Q1<|end|><|assistant|>⟦A1<|end|>⟧<|assistant|>⟦B<|end|>⟧<|user|>Q2<|end|><|assistant|>⟦A2<|end|><|done|>⟧"
    )


def test_template_without_end_of_turn_is_refused_for_many_turns() -> None:
    bare = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = bare + "{% if add_generation_prompt %}[assistant]{% else %}{{ eos_token }}{% endif %}"
    with raises_error(DataError, "rows.jsonl row 1", "message 2"):
        trained(CHAT, byte_tokenizer(template))
    assert trained(CHAT[:2], byte_tokenizer(template)) == "[user]Q1[assistant]⟦A1<|im_end|>⟧"


@pytest.mark.parametrize("name", FAMILIES)
def test_segments_join_to_the_rendering(name: str) -> None:
    tokenizer = family(name)
    encoder = Encoder(tokenizer, DataArguments(), chats=True)
    segments = encoder.template.segments(CHAT)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "".join(segment.text for segment in segments).rstrip() == whole.rstrip()
    assert [segment.text for segment in segments if segment.written][-1].count("A2") == 1
    tokens, mask = encoder.conversation(CHAT, "row")
    text = tokenizer.decode(tokens[mask].tolist())
    assert "Q" not in text
    assert (text.count("A1"), text.count("A2")) in [(1, 1), (0, 1)]


# -- tokenizers that add a blank ---------------------------------------------------------------------------------------


def sentencepiece(kind: str) -> Any:
    """A tokenizer as of Llama 2 (`prepend`), or with a metaspace before the first or each part."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        blank = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(blank)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind)
    characters = sorted({*"▁ |<>\n:.[]/abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"})
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=characters, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world: hello", "user assistant", "a: hello", "hel"] * 5, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return made


@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
@pytest.mark.parametrize("reply", ["hello", "hello world", " hello", "\nhello", "1", "h"])
def test_replies_have_the_tokens_of_their_context(kind: str, reply: str) -> None:
    tokenizer = sentencepiece(kind)
    encoder = Encoder(tokenizer, DataArguments(), chats=True)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}, *CHAT[2:]]
    tokens, mask = encoder.conversation(chat, "row")
    whole = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n"), add_special_tokens=False)
    assert tokenizer.decode(tokens) == tokenizer.decode(whole["input_ids"])
    begin = int(mask.argmax())
    assert tokens[:begin].tolist() == encoder.prompt(chat[:1], "row")[1].tolist()
    after_second = len(tokens) - int(mask[::-1].argmin())
    assert tokens[:after_second].tolist() == encoder.prompt(chat[:3], "row")[1].tolist()


@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
@pytest.mark.parametrize("prompt", ["a: ", "a:", "hel", "a\n", " ", ""])
def test_a_reply_after_text_has_no_other_blank(kind: str, prompt: str) -> None:
    """A token may reach over the end of the prompt, which then has the tokens that generation sees."""
    tokenizer = sentencepiece(kind)
    data = DataArguments(template="plain")
    rows = Rows([("rows.jsonl", [{"prompt": prompt, "response": "hello"}])], data)
    (sequence,), _ = encode_sft(rows, data, tokenizer, prompt_length=99, response_length=99)
    text = tokenizer.decode(tokenizer(prompt + "hello", add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(sequence.tokens).removeprefix("<s>").removesuffix("</s>").strip() == text.strip()
    assert tokenizer.decode(sequence.tokens).count(" ") <= prompt.count(" ") + (kind == "always")
    if prompt:
        (begun,), _ = encode_prompts(rows, data, tokenizer, prompt_length=99)
        assert sequence.tokens[~sequence.loss_mask].tolist() == begun.tokens.tolist()


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    alphabet = "".join(chr(code) for code in range(32, 127)) + "\n"
    made = {kind: sentencepiece(kind) for kind in ("prepend", "first", "always")}
    for kind in ("byte", "bpe", "char"):
        config = TokenizerConfig(kind=kind, alphabet=alphabet, vocab_size=400)
        made[kind] = make_tokenizer(config, ["hello world, hello all\n a: b"] * 9, Path(mkdtemp()))
    return made


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text("aehlo :\n", max_size=6), min_size=2, max_size=4))
def test_pieces_join_to_the_text_after_the_tokens_of_the_prompt(tokenizers: Any, texts: list[str]) -> None:
    for tokenizer in tokenizers.values():
        encoder = Encoder(tokenizer, DataArguments(template="plain"))
        pieces = encoder.encode_pieces(texts, "row")
        assert pieces[0] == encoder.encode(texts[0], "row")
        joined = [token for piece in pieces for token in piece]
        assert encoder.decode(joined) == encoder.decode(encoder.encode("".join(texts), "row"))


# -- values of messages ------------------------------------------------------------------------------------------------

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = (
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THOUGHT = "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ (c.function | tojson) }}{% endfor %}"
FIRST_CALL = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
BARE, FULL = HEAD + TAIL, HEAD + THOUGHT + CALLS + TAIL
ONE_CALL, NAME_ALONE = HEAD + FIRST_CALL + TAIL, HEAD + "{{ m.tool_calls[0].function.name if m.tool_calls }}" + TAIL
CALL_ALONE = FULL.replace("m.content + ", "('' if m.tool_calls else m.content) + ")
NO_THOUGHT = FULL.replace("m.content + ", "m.content.split('</think>')[-1] + ")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(**keys: Any) -> list[dict[str, Any]]:
    return [CHAT[0], {"role": "assistant", "content": "A1", **keys}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_under_each_of_its_keys(key: str) -> None:
    assert trained(reply(**{key: "R1"}), byte_tokenizer(FULL)).endswith("⟦<think>R1</think>A1<|im_end|>⟧")
    for template in ("chatml", "native"):
        with raises_error(DataError, "rows.jsonl row 1", "message 2", key):
            trained(reply(**{key: "R1"}), byte_tokenizer(BARE), template)


@pytest.mark.parametrize(
    ("template", "keys", "key"),
    [
        (BARE, {"tool_calls": [call("weather", city="Ulm")], "content": None}, "tool_calls"),
        (ONE_CALL, {"tool_calls": [call("weather", city="Ulm"), call("weather", city="Bonn")]}, "tool_calls"),
        (ONE_CALL, {"tool_calls": [call("weather"), call("time")]}, "tool_calls"),
        (NAME_ALONE, {"tool_calls": [call("a", b=[{"c": 1}])]}, "tool_calls"),
        (CALL_ALONE, {"tool_calls": [call("weather")]}, "content"),
        (NO_THOUGHT, {"content": "R</think>A"}, "content"),
        (FULL, {"name": "Ann"}, "name"),
        (FULL, {"function_call": {"name": "w", "arguments": "{}"}, "content": None}, "'function_call'"),
        (FULL, {"audio": {"id": 1}}, "'audio'"),
        (FULL, {"prefix": True}, "'prefix'"),
        (FULL, {"reasoning": "R1", "thinking": "R2"}, "thinking"),
    ],
)
def test_values_that_the_model_would_not_see_are_errors(template: str, keys: dict[str, Any], key: str) -> None:
    with raises_error(DataError, "rows.jsonl row 1", "message 2", key):
        trained(reply(**keys), byte_tokenizer(template))


def test_messages_and_tools_that_the_template_drops_are_errors() -> None:
    by_role = HEAD.replace("{{", "{% if m.role in ('user', 'assistant') %}{{", 1)
    template = by_role + TAIL.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    with raises_error(DataError, "row 1", "message 1", "content"):
        trained([{"role": "critic", "content": "C"}, *CHAT], byte_tokenizer(template))
    with raises_error(DataError, "row 1", "tools"):
        trained(CHAT, byte_tokenizer(FULL), tools=[TOOL])
    rows, data = rows_of([{"role": "critic", "content": "C"}, CHAT[0]])
    with raises_error(DataError, "row 1", "message 1", "content"):
        encode_prompts(rows, data, byte_tokenizer(template), prompt_length=99)


def test_empty_values_and_those_of_tool_results_need_no_place() -> None:
    extra = {"name": None, "audio": None, "annotations": [], "refusal": "", "function_call": None}
    chat = [*reply(tool_calls=[call("weather", city=None)], content="", **extra)]
    chat += [{"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "sun"}, CHAT[3]]
    assert "sun<|im_end|>\n<|im_start|>assistant\n⟦A2<|im_end|>⟧" in trained(chat, byte_tokenizer(FULL))


@pytest.mark.parametrize("key", ["weight", "loss_weight"])
def test_replies_of_weight_0_are_read(key: str) -> None:
    chat = [CHAT[0], {**CHAT[1], key: 0}, CHAT[2], {**CHAT[3], key: 1}]
    for template in ("chatml", "native"):
        text = trained(chat, byte_tokenizer(FULL), template)
        assert (text.count("⟦"), "⟦A2<|im_end|>" in text, "A1" in text) == (1, True, True)
    rows, data = rows_of([CHAT[0], {**CHAT[1], key: 0}], CHAT)
    _, counts = encode_sft(rows, data, byte_tokenizer(FULL), prompt_length=99, response_length=99)
    assert (counts.kept, counts.empty) == (1, 1)
    with raises_error(DataError, "row 1", "weight", "train_on_prompt"):
        encode_sft(*rows_of(chat), byte_tokenizer(FULL), prompt_length=99, response_length=99, on_prompt=True)


@pytest.mark.parametrize(("index", "weight"), [(3, 0.5), (3, "no"), (2, 1)])
def test_other_weights_are_errors(index: int, weight: Any) -> None:
    chat = [*CHAT[:index], {**CHAT[index], "weight": weight}, *CHAT[index + 1 :]]
    with raises_error(DataError, "row 1", f"message {index + 1}", "weight"):
        trained(chat, byte_tokenizer(FULL))


# -- reasoning of earlier turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("in_content", [False, True])
def test_replies_whose_reasoning_the_template_removes_are_read(name: str, in_content: bool) -> None:
    def thought(message: dict[str, str], text: str) -> dict[str, str]:
        if in_content:
            return {**message, "content": f"<think>\n{text}\n</think>\n\n{message['content']}"}
        return {**message, "reasoning_content": text}

    chat = [CHAT[0], thought(CHAT[1], "R1"), CHAT[2], thought(CHAT[3], "R2")]
    text = trained(chat, family(name))
    assert (text.count("⟦"), "R1" in text, "A1<|im_end|>" in text) == (1, False, True)
    assert text.split("⟦")[1].removeprefix("<think>\n") == "R2\n</think>\n\nA2<|im_end|>⟧"
    rows, data = rows_of(chat)
    _, counts = encode_sft(rows, data, family(name), prompt_length=999, response_length=999)
    assert (counts.kept, counts.untrained_replies) == (1, 1)


R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
NEMOTRON = R1.replace(
    "'<|assistant|>' + m.content", "'<|assistant|><think>' + (m.reasoning_content or '') + '</think>' + m.content"
)


@pytest.mark.parametrize("template", [R1, NEMOTRON])
@pytest.mark.parametrize(
    ("keys", "thought"),
    [
        ({}, "\n</think>\n\nA2"),
        ({"content": "<think>\nR\n</think>\n\nA2"}, "R\n</think>\n\nA2"),
        ({"content": "R</think>A2"}, "R\n</think>\n\nA2"),
        ({"reasoning": "R"}, "R\n</think>\n\nA2"),
    ],
)
def test_a_reply_ends_the_reasoning_that_its_prompt_begins(template: str, keys: Any, thought: str) -> None:
    text = trained([*CHAT[:3], {**CHAT[3], **keys}], byte_tokenizer(template))
    assert text.endswith(f"<|im_end|><|user|>Q2<|assistant|><think>\n⟦{thought}<|im_end|>⟧")
    assert text.count("⟦") == 1
    assert trained(reply(**keys), byte_tokenizer(template)).count("⟦") == 1


def test_turns_before_a_removed_thought_are_trained() -> None:
    chat = [*CHAT, CHAT[2], {**CHAT[3], "reasoning_content": "R"}, *CHAT[2:]]
    text = trained([*chat[:3], {**chat[3], "reasoning_content": "R"}, *CHAT[2:]], family("qwen3"))
    assert text.count("⟦") == 2
    assert "⟦A1<|im_end|>⟧" in text


def test_reasoning_that_the_template_never_renders_is_an_error() -> None:
    chat = [CHAT[0], {**CHAT[1], "reasoning_content": "R"}, *CHAT[2:]]
    with raises_error(DataError, "row 1", "message 2", "reasoning_content"):
        trained(chat, family("qwen2.5"))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [encode_prompts, encode_sft])
@pytest.mark.parametrize("begin", [{"role": "system", "content": "S"}, {"role": "assistant", "content": "hello"}])
def test_errors_of_templates_name_file_and_row(encode: Any, begin: dict[str, str]) -> None:
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    rows, data = rows_of(CHAT[:2], [begin, *CHAT[:2]], CHAT[:2])
    lengths = {"prompt_length": 99} | ({"response_length": 99} if encode is encode_sft else {})
    if encode is encode_prompts and begin["role"] == "assistant":
        assert len(encode(rows, data, byte_tokenizer(template), **lengths)[0]) == 3
        return
    with raises_error(DataError, "rows.jsonl row 2"):
        encode(rows, data, byte_tokenizer(template), **lengths)


def test_a_greeting_of_weight_0_may_begin_a_chat() -> None:
    greeting = {"role": "assistant", "content": "hello", "weight": 0}
    assert trained([greeting, *CHAT[:2]], byte_tokenizer(BARE)) == (
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n⟦A1<|im_end|>⟧"
    )
