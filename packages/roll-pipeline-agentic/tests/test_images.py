"""Images in episodes and recorded calls: tokens of each turn, images of each turn, and what cannot be seen."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.data.media import image_media, received_message, with_parts
from roll_core.data.processor import processor_of
from roll_core.data.rollouts import rows, sequences_of
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError, EnvironmentFailure
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.rollout import IMAGE, Prompt, RolloutContext
from roll_core.types import Completion, CompletionOutput, Group, SamplingParams
from roll_pipeline_agentic.calls import state_of
from roll_pipeline_agentic.chat_encoder import ChatEncoder, UnseenImageError
from roll_pipeline_agentic.episodes import EpisodeGroup, Episodes
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_pipeline_agentic.recording import Limits, Recorder, RequestError
from roll_pipeline_agentic.recording_dialects import ChatCompletions, Messages, Responses
from roll_testing.errors import mentions
from roll_testing.image_models import IDS, IMAGE_TOKEN, tiny_vision, write_processor
from shared_tests.recording_conformance import ScriptedPolicy

sys.path.insert(0, str(Path(__file__).parent))
from environments_with_images import Pictures, image, message, png
from test_episodes import Config
from test_runs import trained_groups

if TYPE_CHECKING:
    from conftest import AgenticRuns

PROMPT = Prompt(id="guess/0", tokens=np.zeros(0, dtype=np.int64), text="", tag="guess")
FORMS = ("pillow", "bytes", "media", "part", "base64", "url")
OWNER = "environment 'x' of acme 1.0"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    loaded: dict[str, Any] = {}

    def tokenizer(model_type: str) -> Any:
        if model_type not in loaded:
            folder = tmp_path_factory.mktemp(model_type)
            write_processor(folder, model_type)
            loaded[model_type] = AutoTokenizer.from_pretrained(folder)
        return loaded[model_type]

    return tokenizer


def encoder_of(tokenizer: Any, template: str = "native") -> ChatEncoder:
    return ChatEncoder(tokenizer, DataArguments(template=template), where="custom_envs.guess")


def with_template(tokenizer: Any, template: str) -> Any:
    import copy

    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def episodes(
    tokenizer: Any,
    create: Any = Pictures,
    config: Config | None = None,
    isolation: Any = "thread",
    template: str = "native",
    **options: Any,
) -> Episodes:
    config = config or Config()
    host = EnvironmentHost(
        "guess", config.custom_envs["guess"], target="environments_with_images:Pictures", options=options, owner=OWNER,
        isolation=isolation, concurrency=0, create=partial(create, **options),
    )  # fmt: skip
    return Episodes(
        config=config,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        encoders={"guess": encoder_of(tokenizer, template)},
        hosts={"guess": host},
        groups=asyncio.Semaphore(8),
        counts=Counter(),
    )


class Policy(RolloutContext):
    """Replies `a`, `b`, … and ends each turn. Keeps its outputs by key, as the runtime does."""

    def __init__(self, tokenizer: Any, sampled: Any = None) -> None:
        self.tokenizer, self.n, self.params = tokenizer, 1, SamplingParams(max_new_tokens=9)
        self.sampled: dict[str, CompletionOutput] = dict(sampled or {})
        self.calls: list[tuple[str, list[int], tuple[str, ...]]] = []

    async def generate(
        self,
        prompt_ids: Any,
        *,
        n: int = 1,
        params: Any = None,
        media: Any = (),
        key: str = "",
        on_progress: Any = None,
    ) -> Completion:
        self.calls.append((key, prompt_ids.tolist(), tuple(each.digest for each in media)))
        ids = np.array(
            self.tokenizer("abcdef"[len(self.calls)] + self.tokenizer.eos_token)["input_ids"], dtype=np.int64
        )
        output = CompletionOutput(
            token_ids=ids,
            logprobs=np.full(2, -0.5, dtype=np.float32),
            versions=np.zeros(2, dtype=np.int32),
            finish_reason="stop",
        )
        return Completion(id=key, outputs=(self.sampled.setdefault(key, output),))

    async def score(self, group: Group) -> Group:
        raise AssertionError


def played(found: Episodes, policy: Policy) -> Group:
    return asyncio.run(EpisodeGroup(found).run(policy, PROMPT))


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_ids_of_two_turns_are_the_processors_own(tokenizers: Any, model_type: str) -> None:
    from transformers import AutoProcessor

    tokenizer = tokenizers(model_type)
    policy = Policy(tokenizer)
    (sample,) = played(episodes(tokenizer), policy).samples
    processor = AutoProcessor.from_pretrained(tokenizer.name_or_path)
    parts = [message("part", seed) for seed in (1, 2)]
    reply = tokenizer.decode(sample.rollout.turns[0].sampled_ids[:-1])
    chat = [parts[0], {"role": "assistant", "content": [{"type": "text", "text": reply}]}, parts[1]]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = processor(text=text, images=[image(1), image(2)], add_special_tokens=False)["input_ids"][0]
    assert policy.calls[1][1] == list(expected)
    (row,) = rows(sample.rollout)
    assert row.tokens.tolist()[: len(expected)] == list(expected)


def test_turns_have_the_images_of_their_messages(tokenizers: Any) -> None:
    tokenizer = tokenizers("qwen2_5_vl")
    policy = Policy(tokenizer)
    (sample,) = played(episodes(tokenizer), policy).samples
    digests = tuple(image_media(image(seed)).digest for seed in (1, 2))
    assert [media for _, _, media in policy.calls] == [digests[:1], digests]
    turns = sample.rollout.turns
    assert [[media.digest for media in turn.media] for turn in turns] == [[digests[0]], [digests[1]]]
    assert [turn.context_ids.tolist().count(IDS[IMAGE_TOKEN]) for turn in turns] == [2, 2]  # 56 x 28 pixels
    assert turns[1].parent == 0
    (sequence,) = sequences_of(sample, group=0, rollout=0)
    assert tuple(media.digest for media in sequence.media) == digests
    assert not sequence.loss_mask[sequence.tokens == IDS[IMAGE_TOKEN]].any()


def test_an_image_of_the_second_turn_changes_no_earlier_logprob(tokenizers: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = tokenizers("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(tiny_vision(tmp_path, "qwen2_5_vl"))

    def logits(*seeds: int) -> tuple[Any, Any]:
        (sample,) = played(episodes(tokenizer, seeds=seeds), Policy(tokenizer)).samples
        (row,) = rows(sample.rollout)
        processor = processor_of(tokenizer)
        assert processor is not None
        ids = torch.from_numpy(row.tokens)[None]
        inputs = {name: torch.from_numpy(array) for name, array in processor.inputs(row.media).items()}
        types = (ids == IDS[IMAGE_TOKEN]).long()
        with torch.no_grad():
            return row, model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0]

    row, first = logits(1, 2)
    other, changed = logits(1, 5)
    assert row.tokens.tolist() == other.tokens.tolist()
    difference = (first - changed).abs().amax(-1).numpy()
    begin = int(np.flatnonzero(row.tokens == IDS[IMAGE_TOKEN])[2])
    assert difference[:begin].max() == 0
    assert difference[begin:].min() > 1e-4
    assert row.loss_mask[:begin].sum() == 2


def test_a_result_without_space_for_a_reply_leaves_no_image(tokenizers: Any) -> None:
    tokenizer = tokenizers("qwen2_5_vl")
    policy = Policy(tokenizer)
    (sample,) = played(episodes(tokenizer, tail="x" * 500), policy).samples
    assert len(policy.calls) == 1
    assert sample.finish_reason == "length"
    assert [len(turn.media) for turn in sample.rollout.turns] == [1]
    (sequence,) = sequences_of(sample, group=0, rollout=0)
    assert len(sequence.media) * 2 == int((sequence.tokens == IDS[IMAGE_TOKEN]).sum())


@pytest.mark.parametrize(("seeds", "repeats"), [((1, 2), 0), ((1, 5), 1)], ids=["same", "another image"])
def test_a_resumed_episode_repeats_its_images(tokenizers: Any, seeds: Any, repeats: int) -> None:
    """Images of one size have equal tokens, so the tokens alone would not show that an image differs."""
    tokenizer = tokenizers("qwen2_5_vl")

    async def run() -> tuple[Episodes, Policy, Policy, Group]:
        before = Policy(tokenizer)
        program = EpisodeGroup(episodes(tokenizer))
        await program.run(before, PROMPT)
        found = episodes(tokenizer, seeds=seeds)
        again = EpisodeGroup(found)
        again.restore(json.loads(json.dumps(program.snapshot())))
        policy = Policy(tokenizer, before.sampled)
        return found, before, policy, await again.run(policy, PROMPT)

    found, before, policy, group = asyncio.run(run())
    assert found.counts["guess", "repeats"] == repeats
    if repeats:
        assert [key for key, _, _ in policy.calls] == ["0/0/0", "0/1/0", "0/1/1"]
    else:
        assert policy.calls == before.calls
    assert len(group.samples[0].media) == 2


def test_images_of_one_size_make_different_states() -> None:
    one, two = (received_message(message("pillow", seed)) for seed in (1, 2))
    assert state_of(None, [one]) == state_of(None, [received_message(message("media", 1))])
    assert state_of(None, [one]) != state_of(None, [two])


# -- forms of images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_is_the_same_pixels(
    tokenizers: Any, form: str, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    async def run() -> Any:
        found = episodes(tokenizers("qwen2_5_vl"), isolation=isolation, form=form)
        host = found.hosts["guess"]
        try:
            async with host.environment() as environment:
                return await environment.reset({}, 0)
        finally:
            await host.close()

    (received,) = asyncio.run(run()).messages
    (media,) = received["media"]
    assert received["content"] == f"see{IMAGE}now"
    assert (media.width, media.height) == (56, 28)
    assert np.array_equal(np.asarray(media.image()), np.asarray(image(1)))


@pytest.mark.parametrize("form", ["remote", "path", "video", "corrupt", "empty"])
def test_an_image_that_cannot_be_read_is_a_failure(tokenizers: Any, form: str) -> None:
    async def run() -> None:
        async with episodes(tokenizers("qwen2_5_vl"), form=form).hosts["guess"].environment() as environment:
            await environment.reset({}, 0)

    with pytest.raises(EnvironmentFailure) as caught:
        asyncio.run(run())
    assert mentions(str(caught.value), "custom_envs.guess", "acme", "reset")


def test_texts_may_contain_the_character_of_an_image_place(tokenizers: Any) -> None:
    encoder = encoder_of(tokenizers("qwen2_5_vl"))
    parts = [{"type": "text", "text": f"a{IMAGE}b"}, {"type": "image", "image": image(1)}]
    chat = encoder.encode([{"role": "system", "content": IMAGE}, received_message({"role": "user", "content": parts})])
    assert len(chat.media) == 1
    assert chat.ids.tolist().count(IDS[IMAGE_TOKEN]) == 2
    assert received_message({"role": "user", "content": f"a{IMAGE}b"})["content"] == f"a{IMAGE}b"


def test_messages_in_the_format_of_openai_are_the_same() -> None:
    received = received_message(message("pillow", 3))
    text = {"role": "user", "content": "1"}
    sent = json.loads(json.dumps(with_parts([received, text], data=True)))
    assert [received_message(message) for message in sent] == [received, text]


# -- images that the model cannot see ----------------------------------------------------------------------------------

DROPS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text or '' }}{% endfor %};{% endfor %}"
IMAGES_FIRST = (
    "{% for m in messages %}{% if m.content is not string %}{% for p in m.content if p.type == 'image' %}"
    "<|image_pad|>{% endfor %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}{{ p.text }}"
    "{% endfor %}{% endif %};{% endfor %}"
)


def test_a_model_of_text_names_the_package_that_sends_images(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path)
    found = episodes(tokenizer, template="plain")
    with pytest.raises(DataError) as caught:
        played(found, Policy(tokenizer))
    assert mentions(str(caught.value), "acme", "custom_envs.guess", "reset")
    assert not isinstance(caught.value, EnvironmentFailure)


def test_a_template_that_drops_images_names_the_package(tokenizers: Any) -> None:
    tokenizer = with_template(tokenizers("qwen2_5_vl"), DROPS)
    with pytest.raises(DataError) as caught:
        played(episodes(tokenizer), Policy(tokenizer))
    assert mentions(str(caught.value), "acme", "custom_envs.guess", "user")


def test_a_template_that_moves_images_is_refused(tokenizers: Any) -> None:
    encoder = encoder_of(with_template(tokenizers("qwen2_5_vl"), IMAGES_FIRST))
    first, second = (received_message(message("pillow", seed)) for seed in (1, 2))
    assert len(encoder.encode([first]).media) == 1
    with pytest.raises(UnseenImageError):
        encoder.encode([first, {"role": "assistant", "content": "x"}, second])


def test_a_text_with_a_placeholder_is_a_failure_of_the_episode(tokenizers: Any) -> None:
    encoder = encoder_of(tokenizers("qwen2_5_vl"))
    with pytest.raises(DataError) as caught:
        encoder.encode([{"role": "user", "content": IMAGE_TOKEN}])
    assert not isinstance(caught.value, UnseenImageError)


# -- recorded calls ----------------------------------------------------------------------------------------------------

URL = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("dialect", "body", "place"),
    [
        (
            ChatCompletions(),
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
            0,
        ),
        (
            ChatCompletions(),
            {
                "messages": [
                    {"role": "user", "content": "look"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {
                        "role": "tool",
                        "tool_call_id": "c",
                        "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}],
                    },
                ]
            },
            2,
        ),
        (Responses(), {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}, 0),
        (
            Responses(),
            {
                "input": [
                    {"role": "user", "content": "look"},
                    ITEM,
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": URL}],
                    },
                ]
            },
            2,
        ),
        (
            Messages(),
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
            0,
        ),
        (
            Messages(),
            {
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [{"type": "image", "source": SOURCE}],
                            }
                        ],
                    }
                ],
            },
            0,
        ),
    ],
)
def test_images_of_requests_become_media(dialect: Any, body: Any, place: int) -> None:
    found = dialect.parse(json.loads(json.dumps(body)), {}).messages[place]
    assert found["content"] == IMAGE
    assert np.array_equal(np.asarray(found["media"][0].image()), np.asarray(image(1)))


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions(), {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}),
        (ChatCompletions(), {"type": "image_url", "image_url": {"url": "/etc/hostname"}}),
        (ChatCompletions(), {"type": "image", "path": "/etc/hostname"}),
        (ChatCompletions(), {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}),
        (ChatCompletions(), {"type": "video_url", "video_url": {"url": URL}}),
        (Messages(), {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}),
        (Messages(), {"type": "image", "source": {"type": "file", "file_id": "f"}}),
    ],
)
def test_a_request_cannot_make_the_endpoint_read_a_file_or_url(dialect: Any, body: Any) -> None:
    with pytest.raises(RequestError) as caught:
        dialect.parse({"max_tokens": 9, "messages": [{"role": "user", "content": [body]}]}, {})
    assert caught.value.status == 400


def test_an_image_of_a_reply_or_system_message_is_refused() -> None:
    for role in ("assistant", "system"):
        body = {"messages": [{"role": role, "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
        with pytest.raises(RequestError):
            ChatCompletions().parse(body, {})


def test_calls_with_other_images_are_branches_of_the_tree(tokenizers: Any) -> None:
    """Conversations whose tokens are equal and whose images differ do not continue each other."""
    tokenizer = tokenizers("qwen2_5_vl")

    async def run() -> Any:
        policy = ScriptedPolicy(tokenizer, ["one", "two", "three", "four"])
        recorder = Recorder(policy, encoder_of(tokenizer), Limits(calls=9, reply_tokens=50, tokens=900), key="0/0")

        async def call(*messages: Any) -> Any:
            body = {"messages": list(messages)}
            parsed = ChatCompletions().parse(json.loads(json.dumps(body)), {})
            call = recorder.begin(parsed, digest=json.dumps(body))
            (reply,) = await call.task
            call.delivered = True
            return dict(reply.message)

        received = [received_message(message("pillow", seed)) for seed in (1, 2)]
        first, second = with_parts(received, data=True)
        reply = await call(first)
        await call(first, reply, second)
        await call(first, reply, first)
        other = await call(second)
        return policy, await recorder.finish(), other

    policy, rollout, _ = asyncio.run(run())
    digests = [image_media(image(seed)).digest for seed in (1, 2)]
    assert [[media.digest for media in call.media] for call in policy.calls] == [
        digests[:1], digests, [digests[0], digests[0]], digests[1:],
    ]  # fmt: skip
    assert [turn.parent for turn in rollout.turns] == [None, 0, 0, None]
    assert [[media.digest for media in turn.media] for turn in rollout.turns] == [
        digests[:1], digests[1:], digests[:1], digests[1:],
    ]  # fmt: skip
    assert [len(row.media) for row in rows(rollout)] == [2, 2, 1]


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_trains_on_the_same_images(runs: AgenticRuns, tmp_path: Path) -> None:
    """Trainer and engine agree on the logprobs of both turns, with an image encoder that is trained and published."""
    folder = tiny_vision(tmp_path / "model", "qwen2_5_vl")

    def config(name: str, **given: Any) -> dict[str, Any]:
        environment = {"environment": "environments_with_images:Pictures", "isolation": "thread"}
        config = runs.config(
            exp_name=name,
            pretrain=str(folder),
            max_actions_per_traj=2,
            is_use_additional_prompts=True,
            max_additional_running_prompts=2,
            max_steps=3,
            save_steps=1,
            record_rollouts=True,
            custom_envs={"guess": environment},
            **given,
        )
        del config["tokenizer"], config["actor_train"]["model_args"]["random_init"], config["actor_train"]["data_args"]
        config["actor_train"]["model_args"]["freeze"] = []
        return config

    whole = runs.ok(config("whole"))
    digests = [image_media(image(seed)).digest for seed in (1, 2)]
    for sample in runs.samples(whole):
        # A second turn that does not continue the first one's tokens has read both images.
        assert list(dict.fromkeys(entry["digest"] for entry in sample["images"])) == digests
    gaps = [metrics["actor/logprob_gap"] for metrics in runs.metrics(whole) if "actor/logprob_gap" in metrics]
    assert gaps
    assert max(gaps) < 1e-4
    resumed = runs.ok(config("resumed", resume_from_checkpoint=str(whole.run_dir.checkpoints / "step-1")))
    # Logprobs of prompts with images may differ by a rounding, because other prompts are computed beside them.
    logprobs = re.compile(r'"logprobs": \["<f4", \[\d+\], "[^"]*"\]')
    before, after = (logprobs.sub("", str(trained_groups(runs, run))) for run in (whole, resumed))
    assert before == after
