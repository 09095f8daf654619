"""Prompts have the same tokens in training and in generation, and exactly the model's own tokens are learnt."""

from __future__ import annotations

import json
import string
from datetime import datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from roll_core.data.encode import Encoder, encode_prompts, encode_sft, tokenizer_texts
from roll_core.data.rows import read_rows
from roll_core.data.templates import chat_template_of, control_tokens, load_template, set_date
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_testing.errors import raises_error

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]
NATIVE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def load(tmp_path):
    """`load(rows, template=..., native=...)`: rows, their arguments, and a tokenizer made for them."""

    def make(rows, *, kind="char", native=None, alphabet=None, **arguments):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataArguments(file_name=str(tmp_path / "rows.jsonl"), **arguments)
        found = read_rows(data)
        tokenizer = make_tokenizer(
            TokenizerConfig(kind=kind, alphabet=alphabet, vocab_size=300),
            [*tokenizer_texts(found, data), "[]assistantsystemuser\n"],
            tmp_path / "tokenizer",
            control_tokens=control_tokens(data.template),
        )
        tokenizer.chat_template = native
        return found, data, tokenizer

    return make


def learnt(sequence, tokenizer):
    return tokenizer.decode(sequence.tokens.tolist()), tokenizer.decode(sequence.tokens[sequence.loss_mask].tolist())


QWEN_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
SINGLE = {
    "plain": ("hi", "hello<eos>"),
    "chatml": ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello<|im_end|><eos>"),
    "qwen": (f"{QWEN_SYSTEM}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello<|im_end|><eos>"),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "hello<|eot_id|><eos>",
    ),
}


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("template", SINGLE)
def test_named_templates_write_and_mask_as_documented(load, template, kind):
    rows, data, tokenizer = load([{"prompt": "hi", "response": "hello"}], template=template, kind=kind)
    prompt, response = SINGLE[template]
    ((sequence,), counts) = encode_sft(rows, data, tokenizer, prompt_length=200, response_length=50)
    assert learnt(sequence, tokenizer) == (prompt + response, response)
    assert counts.kept == 1
    ((one,), _) = encode_prompts(rows, data, tokenizer, prompt_length=200)
    assert one.text == prompt
    assert one.tokens.tolist() == sequence.tokens[~sequence.loss_mask].tolist()


def test_tokenizer_template_adds_its_end_token_once(load):
    rows, data, tokenizer = load([{"prompt": "hi", "response": "hello"}], native=NATIVE)
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=200, response_length=50)
    assert learnt(sequence, tokenizer) == ("[user]hi\n[assistant]hello<eos>", "hello<eos>")


@pytest.mark.parametrize(
    ("arguments", "whole", "own"),
    [
        ({"native": NATIVE}, "[user]hi\n[assistant]hello<eos>\n[user]bye\n[assistant]ciao<eos>", "hello<eos>ciao<eos>"),
        (
            {"template": "chatml"},
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|><eos>\n"
            "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nciao<|im_end|><eos>",
            "hello<|im_end|><eos>ciao<|im_end|><eos>",
        ),
        ({"template": "plain"}, "hihello<eos>byeciao<eos>", "hello<eos>ciao<eos>"),
    ],
)
def test_every_answer_of_a_chat_is_learnt_and_nothing_else(load, arguments, whole, own):
    rows, data, tokenizer = load([{"chat": CHAT}], messages="chat", **arguments)
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=200, response_length=200)
    assert learnt(sequence, tokenizer) == (whole, own)


@pytest.mark.parametrize("template", ["plain", "chatml", "qwen", "llama3"])
def test_prompts_with_history_begin_the_conversation(load, template):
    rows, data, tokenizer = load([{"chat": CHAT[:3]}, {"chat": CHAT}], messages="chat", template=template)
    prompts, _ = encode_prompts(rows, data, tokenizer, prompt_length=200)
    encoder = Encoder(tokenizer, data)
    tokens, written = encoder.conversation(CHAT, "")
    own = tokenizer("ciao", add_special_tokens=False)["input_ids"]
    history = len(tokens) - len(own) - (1 if template == "plain" else 2)
    assert written[history:].all()
    assert [each.tokens.tolist() for each in prompts] == [tokens[:history].tolist()] * 2


@pytest.fixture(scope="module")
def covering(tmp_path_factory):
    """Tokenizers that cover every template and `string.printable`, by kind."""
    control = [token for name in SINGLE for token in control_tokens(name)]
    return {
        kind: make_tokenizer(
            TokenizerConfig(kind=kind, alphabet=string.printable, vocab_size=300),
            ["a hello hello\n\nuser assistant"] * 9,
            tmp_path_factory.mktemp(kind),
            control_tokens=control,
        )
        for kind in ("char", "byte", "bpe")
    }


def chats():
    def turns(count):
        return st.lists(st.text(string.printable, max_size=12), min_size=count, max_size=count)

    def chat(system, contents):
        asked = [{"role": "system", "content": system}] if system is not None else []
        return asked + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]

    return st.builds(chat, st.none() | st.text(string.printable, max_size=9), st.integers(1, 5).flatmap(turns))


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("template", SINGLE)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(chat=chats())
def test_an_exported_template_gives_the_tokens_of_the_named_one(covering, template, kind, chat):
    tokenizer = covering[kind]
    named = Encoder(tokenizer, DataArguments(messages="chat", template=template))
    tokenizer.chat_template = chat_template_of(template, tokenizer)
    native = Encoder(tokenizer, DataArguments(messages="chat"))
    try:
        text, tokens = native.prompt(chat, "")
        assert (text, tokens.tolist()) == (named.prompt(chat, "")[0], named.prompt(chat, "")[1].tolist())
        served = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokens.tolist() == served
        learnt = [*chat, {"role": "assistant", "content": "hello"}]
        for one, other in zip(native.conversation(learnt, ""), named.conversation(learnt, ""), strict=True):
            assert one.tolist() == other.tolist()
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize("columns", [{"messages": "chat"}, {"system": "system"}])
def test_chats_need_a_template_and_prompts_do_not(load, columns):
    row = {"prompt": "48+43", "response": "91", "system": "Add.", "chat": CHAT}
    rows, data, tokenizer = load([row], **columns)
    for encode in (encode_prompts, encode_sft):
        lengths = {"prompt_length": 99} | ({"response_length": 99} if encode is encode_sft else {})
        with raises_error(DataError, "data_args.template"):
            encode(rows, data, tokenizer, **lengths)
    bare, data, tokenizer = load([row])
    assert encode_prompts(bare, data, tokenizer, prompt_length=99)[0][0].text == "48+43"


def test_a_template_that_rewrites_earlier_turns_is_refused(load):
    rows, data, tokenizer = load([{"chat": CHAT}], messages="chat", native=FORGETFUL)
    with raises_error(DataError, "template", "message 2"):
        encode_sft(rows, data, tokenizer, prompt_length=200, response_length=200)
    single, data, tokenizer = load([{"chat": CHAT[:2]}], messages="chat", native=FORGETFUL)
    ((sequence,), _) = encode_sft(single, data, tokenizer, prompt_length=200, response_length=200)
    assert learnt(sequence, tokenizer)[1] == "hello<eos>"


def test_prompt_and_response_are_encoded_apart(load):
    """A tokenizer that merges over the seam would otherwise train on a prompt that generation never sees."""
    rows, data, tokenizer = load([{"prompt": "ab", "response": "ab"}] * 1, kind="bpe", template="plain")
    tokenizer_ids = tokenizer("abab")["input_ids"]
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=9, response_length=9)
    ((prompt,), _) = encode_prompts(rows, data, tokenizer, prompt_length=9)
    assert sequence.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
    assert len(tokenizer_ids) <= len(sequence.tokens) - 1


def test_uncovered_characters_name_the_row(load):
    rows, data, tokenizer = load(
        [{"prompt": "1+1=", "response": "2"}, {"prompt": "1×é", "response": "2"}], alphabet="0123456789+="
    )
    with raises_error(DataError, "rows.jsonl", "row 2", "'×'", "'é'"):
        encode_sft(rows, data, tokenizer, prompt_length=9, response_length=9)


LONG = [
    {"prompt": "123", "response": "12345"},
    {"prompt": "1234", "response": "1"},
    {"prompt": "1", "response": "1"},
]


def test_overlong_rows_are_dropped_and_counted(load):
    rows, data, tokenizer = load(LONG)
    sequences, counts = encode_sft(rows, data, tokenizer, prompt_length=3, response_length=5)
    assert [each.id for each in sequences] == ["2"]
    assert str(counts) == "1 kept, 1 overlong prompts, 1 overlong responses"


def test_overlong_responses_are_truncated_if_configured(load):
    rows, data, tokenizer = load(LONG)
    sequences, counts = encode_sft(rows, data, tokenizer, prompt_length=3, response_length=5, overlong="truncate")
    assert learnt(sequences[0], tokenizer) == ("12312345", "12345")
    assert str(counts) == "2 kept, 1 overlong prompts, 1 truncated responses"
    _, counts = encode_sft(rows, data, tokenizer, prompt_length=4, response_length=6)
    assert str(counts) == "3 kept"


def test_prompts_longer_than_the_limit_are_left_out(load):
    rows, data, tokenizer = load(LONG)
    prompts, counts = encode_prompts(rows, data, tokenizer, prompt_length=3)
    assert [each.id for each in prompts] == ["0", "2"]
    assert counts.overlong_prompts == 1
    assert prompts[0].metadata["response"] == "12345"
    with raises_error(DataError, "3", "prompt_length"):
        encode_prompts(rows, data, tokenizer, prompt_length=0)


def test_learning_the_prompt_too_leaves_out_only_the_first_token(load):
    rows, data, tokenizer = load([{"prompt": "12", "response": "3"}])
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=9, response_length=9, on_prompt=True)
    assert sequence.loss_mask.tolist() == [False, True, True, True]


def test_empty_prompt_is_refused_but_its_response_is_trained(load):
    rows, data, tokenizer = load([{"prompt": "", "response": "12"}])
    with raises_error(DataError, "row 1"):
        encode_prompts(rows, data, tokenizer, prompt_length=9)
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=9, response_length=9)
    assert sequence.loss_mask.tolist() == [False, True, True]


def test_an_empty_response_is_the_end_token_alone(load):
    rows, data, tokenizer = load([{"prompt": "12", "response": ""}])
    ((sequence,), _) = encode_sft(rows, data, tokenizer, prompt_length=9, response_length=9)
    assert learnt(sequence, tokenizer)[1] == "<eos>"


def test_unknown_templates_and_control_tokens_are_refused(load):
    _, _, tokenizer = load([{"prompt": "12", "response": "3"}])
    with raises_error(DataError, "'chatmal'"):
        load_template("chatmal", tokenizer)
    with raises_error(DataError, "im_start"):
        load_template("chatml", tokenizer)


IN_A_VARIABLE = "{%- if strftime_now is defined %}{%- set day = strftime_now('%Y-%m-%d') %}{%- endif %}{{ day }}"
IN_A_MACRO = "{%- macro system() %}{{ 'On ' + strftime_now('%-d %B, %H:%M') }}{% endmacro %}{{ system() }}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2001"),
        (f"\n {IN_A_VARIABLE}", "2001-02-03"),
        (IN_A_MACRO, "On 3 February, 04:05"),
        ("  {% if strftime_now is defined %}x{% endif %}", "x"),
        ("  y{{ strftime_now('%y') }}", "  y01"),
    ],
)
def test_a_template_sees_the_date_of_the_run(tmp_path, template, text):
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), (), tmp_path)
    tokenizer.chat_template = template + "{{ messages[0].content }}"
    encoder = Encoder(tokenizer, DataArguments(messages="messages"))
    set_date(tokenizer, datetime(2001, 2, 3, 4, 5))
    assert encoder.prompt([{"role": "user", "content": "!"}], "row")[0] == text + "!"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer.chat_template
