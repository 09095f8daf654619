"""What the report's script shows: samples turn by turn, chosen steps, charts by keyboard, light and dark."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quickjs

from roll_core.data.rollouts import sample_of_rollout
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.run_files import SamplesFile
from roll_core.runtime.records.tracking import MetricsFile
from roll_core.types import Reward, Rollout, Sample, TurnRecord
from roll_tools.page import write_report

DOM = Path(__file__).with_name("dom.js").read_text(encoding="utf-8")
VOID = {"meta", "input", "br", "img", "link"}


class Tree(HTMLParser):
    """The elements of a page as nested lists: name, attributes, children."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.root: list[Any] = ["html", {}, []]
        self._open = [self.root]
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html":
            self.root[1].update({name: value or "" for name, value in attrs})
            return
        node = [tag, {name: value or "" for name, value in attrs}, []]
        self._open[-1][2].append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if any(node[0] == tag for node in self._open[1:]):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        tag, attributes, children = self._open[-1]
        children.append(data)
        if tag == "script" and "type" not in attributes:
            self.scripts.append(data)


class Browser:
    """A page whose scripts have run."""

    def __init__(self, html: str, *, dark: bool = False) -> None:
        tree = Tree(html)
        self._engine = quickjs.Context()
        self._engine.eval(f"const DARK = {json.dumps(dark)}, PAGE = {json.dumps(json.dumps(tree.root))};\n{DOM}")
        for script in tree.scripts:
            self._engine.eval(script)

    def run(self, code: str) -> Any:
        """The value of an expression, by way of JSON."""
        found = self._engine.eval(f"JSON.stringify({code} ?? null)")
        return json.loads(found)

    def texts(self, selector: str, within: str = "") -> list[str]:
        """Texts of the elements of a selector, also below the element with the id `within`."""
        place = f"document.getElementById({json.dumps(within)})" if within else "document"
        return self.run(f"[...{place}.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")  # type: ignore[no-any-return]

    def click(self, id: str) -> None:
        """Press a button, unless it is disabled."""
        self.run(f"((e) => e.disabled ? null : e.dispatch('click'))(document.getElementById({json.dumps(id)}))")

    def set(self, id: str, value: str | int) -> None:
        """Give an input or a selection another value."""
        place = f"document.getElementById({json.dumps(id)})"
        self.run(
            f"((e) => {{ e.value = {json.dumps(str(value))}; e.dispatch('input'); e.dispatch('change'); }})({place})"
        )

    def key(self, selector: str, *keys: str, **given: bool) -> list[bool]:
        """Press keys on the first element of a selector. True for those that the page used."""
        place = f"document.querySelectorAll({json.dumps(selector)})[0]"
        return [self.run(f"{place}.dispatch('keydown', {json.dumps({'key': each, **given})})") for each in keys]


ATTACK = "</script><img src=x onerror=alert(1)>"


def turn(
    read: str, sampled: str, parent: int | None, reward: float | None, *, version: int = 1, until: int = 99
) -> Any:
    """A turn with one token per character; sampled ones before `until` are trained."""
    count = len(sampled)
    return TurnRecord(
        parent=parent,
        context_ids=np.array([*map(ord, read)], dtype=np.int64),
        sampled_ids=np.array([*map(ord, sampled)], dtype=np.int64),
        logprobs=np.zeros(count, dtype=np.float32),
        versions=np.full(count, version, dtype=np.int32),
        loss_mask=np.arange(count) < until,
        finish_reason="stop",
        reward=reward,
    )


def episode(id: str, turns: Any, reward: Reward, tag: str = "game", player: str = "") -> Sample:
    group = id.partition("/")[0]
    return sample_of_rollout(
        Rollout(turns=tuple(turns)), id=id, group_id=group, finish_reason="stop", reward=reward, tag=tag, player=player
    )


FORKED = [
    turn("Guess.", "call 5 now", None, 0.25, until=6),
    turn("Too low.", "7", 0, None, version=2),
    turn("Too high.", ATTACK, 0, -1.0, version=2),
]


@pytest.fixture
def browser(tmp_path: Path) -> Any:
    """`browser(samples by step)`: the report of a run in progress, opened."""

    def opened(steps: dict[int, list[Sample]], *, dark: bool = False, **metrics: Any) -> Browser:
        run = RunDir.create(tmp_path, "grpo")
        file = SamplesFile(run.samples, lambda ids: "".join(map(chr, ids)))
        for step, samples in steps.items():
            file.write(step, samples)
        file.close()
        written = MetricsFile(run.metrics)
        for step in range(1, 9):
            written.log(step, {"score/mean": float(step)} | metrics)
        written.close()
        return Browser(write_report(run.path).read_text(encoding="utf-8"), dark=dark)

    return opened


def two_episodes() -> list[Sample]:
    good = Reward(value=1.0, detail={"solved": 1.0})
    short = [turn("Guess.", "five", None, 0.5)]
    return [episode("g/0", FORKED, good), episode("g/1", short, Reward(value=-0.5))]


def test_episode_is_shown_by_turn_with_masks_and_rewards(browser: Any) -> None:
    page = browser({3: two_episodes()})
    (prompt,) = page.texts(".prompt", within="browser")
    assert prompt.endswith("Guess.")
    captions = page.run(
        "document.querySelectorAll('.response').map((r) => r.querySelectorAll('.cap').map((c) => c.textContent))"
    )
    assert captions[0] == [
        "tokens 65finish reason stopweight version 2solved 1",
        "turn 1reward 0.25weight version 1",
        "turn 2weight version 2",
        "turn 3continues turn 1reward -1weight version 2",
    ]
    assert captions[1][1:] == ["turn 1reward 0.5"]  # one version: it is in the sample's line only
    replies = page.run(
        "document.querySelectorAll('.response')"
        ".map((r) => r.querySelectorAll('.text').map((t) => [t.className, t.textContent]))"
    )
    assert replies[0] == [
        ["text", "call 5 now"],
        ["text read", "Too low."],
        ["text", "7"],
        ["text read", "Too high."],
        ["text", ATTACK],
    ]
    # The mask of the first turn: six trained tokens, then four that are not.
    (first, _) = page.run(
        "document.querySelectorAll('.response')"
        ".map((r) => r.querySelectorAll('.text')[0].children.map((s) => [s.className, s.textContent]))"
    )
    assert first == [["", "call 5"], ["untrained", " now"]]
    assert page.texts("img") == []


def test_rewards_are_coloured_between_the_lowest_and_the_highest(browser: Any) -> None:
    samples = [*two_episodes(), episode("g/2", FORKED[:1], Reward(value=None, failure="no box"))]
    page = browser({3: samples})
    badges = page.run(
        "document.querySelectorAll('.reward').map((e) => [e.className, e.textContent, e.style.color ?? ''])"
    )
    assert badges == [
        ["reward", "1", "var(--good)"],
        ["reward", "-0.5", "var(--bad)"],
        ["reward failed", "failed", ""],
    ]
    mixed = page.run("document.querySelectorAll('.reward').map((e) => e.style.background ?? '')")
    assert [each.partition("var(--good-bg) ")[2][:4] for each in mixed] == ["100%", "0%, ", ""]


def test_steps_are_chosen_by_buttons_and_slider(browser: Any) -> None:
    steps = {
        step: [episode(f"{step}/0", [turn("Go.", f"step {step}", None, 1.0)], Reward(value=float(step)))]
        for step in (2, 4, 9)
    }
    page = browser(steps)

    def state() -> tuple[str, str]:
        at = page.run("document.getElementById('at').textContent")
        (row,) = page.texts(".response")
        return at, row[-6:]

    assert state() == ("step 9", "step 9")
    page.click("next")  # disabled at the end
    assert state() == ("step 9", "step 9")
    page.click("prev")
    assert state() == ("step 4", "step 4")
    page.set("step", 0)
    assert state() == ("step 2", "step 2")
    page.click("prev")
    assert state() == ("step 2", "step 2")


def test_samples_are_filtered_ordered_and_found(browser: Any) -> None:
    other = episode("h/0", [turn("Play.", "rock", None, None)], Reward(value=0.25), tag="nim", player="first")
    page = browser(
        {1: [episode("a/0", [turn("Go.", "needle", None, 1.0)], Reward(value=2.0))], 2: [*two_episodes(), other]}
    )
    assert page.texts(".reward") == ["1", "-0.5", "0.25"]
    page.set("order", 1)
    assert page.texts(".reward") == ["-0.5", "1", "0.25"]  # groups stay together, by their first sample
    page.set("order", "")
    page.set("tag", "nim")
    assert page.texts(".reward") == ["0.25"]
    assert "player first" in page.texts(".cap", within="browser")[1]
    page.set("tag", "")
    page.set("find", "NEEDLE")
    assert page.texts(".reward") == ["2"]
    assert page.run("document.getElementById('at').textContent") == "all steps"
    page.set("find", "too low")  # a message between turns
    assert page.texts(".reward") == ["1"]
    page.set("find", "nowhere")
    assert page.texts(".empty", within="browser") == ["no matching sample"]


def test_a_chart_is_read_by_keyboard(browser: Any) -> None:
    page = browser({})
    assert page.texts(".val")[0] == "8"
    assert page.key("svg", "ArrowLeft", "ArrowLeft") == [True, True]
    assert (page.texts(".val")[0], page.texts("small")[0]) == ("6", "step 6")
    page.key("svg", "Home")
    assert page.texts(".val")[0] == "1"
    whole = page.run("document.querySelectorAll('.plot')[0].getAttribute('viewBox')")
    page.key("svg", "+")
    assert page.run("document.querySelectorAll('.plot')[0].getAttribute('viewBox')") != whole
    page.key("svg", "Escape")
    assert page.run("document.querySelectorAll('.plot')[0].getAttribute('viewBox')") == whole
    assert page.texts(".val")[0] == "8"
    assert page.key("svg", "Tab") == [False]
    assert page.key("svg", "+", ctrlKey=True) == [False]  # the browser's own zoom


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_is_that_of_the_system_until_it_is_chosen(browser: Any, dark: bool) -> None:
    page = browser({}, dark=dark)
    names = ["light", "dark"]
    assert page.run("root.dataset.theme") == names[dark]
    page.click("theme")
    assert page.run("[root.dataset.theme, stored['roll-theme']]") == [names[not dark]] * 2
    page.run("windowListeners.beforeprint()")
    assert page.run("root.dataset.theme") == "light"
    page.run("windowListeners.afterprint()")
    assert page.run("root.dataset.theme") == names[not dark]


def test_turns_of_a_damaged_file_are_left_out(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "grpo")
    run.samples.write_text(
        '{"step": 1, "response": "x", "turns": [1, null, {"response": "y", "versions": [1]}, {"response": "z"}]}\n'
    )
    page = Browser(write_report(run.path).read_text(encoding="utf-8"))
    assert [each for each in page.texts(".text", within="browser") if each] == ["y", "z"]
