import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from roll_core.data.media import image_media
from roll_core.errors import RunDirectoryError
from roll_core.runtime.records.media_folder import MediaFolder
from roll_core.runtime.records.run_files import SamplesFile
from roll_core.types import Media, Reward, Sample
from roll_testing.errors import raises_error


def sample(group: int, index: int, text: str = "42", **fields: object) -> Sample:
    ids = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32).astype(np.int64)
    known: dict[str, object] = {
        "id": f"{group}/0/{index}",
        "group_id": f"{group}/0",
        "prompt_ids": np.array([ord("?")]),
        "response_ids": ids,
        "logprobs": np.zeros(len(ids), np.float32),
        "loss_mask": np.ones(len(ids), bool),
        "versions": np.full(len(ids), 3, np.int32),
        "finish_reason": "stop",
    }
    return Sample(**(known | fields))  # type: ignore[arg-type]


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


@pytest.fixture
def open_file() -> Iterator[Callable[..., SamplesFile]]:
    files: list[SamplesFile] = []

    def opened(path: Path, **options: object) -> SamplesFile:
        files.append(SamplesFile(path, decode, **options))  # type: ignore[arg-type]
        return files[-1]

    yield opened
    for file in files:
        file.close()


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sample_is_recorded_as_a_person_reads_it(tmp_path: Path, open_file: Callable[..., SamplesFile]) -> None:
    file = open_file(tmp_path / "s.jsonl")
    reward = Reward(value=0.5, detail={"format": 1.0})
    file.write(
        1,
        [
            sample(
                7,
                0,
                "größe\n🎉",
                tag="math",
                reward=reward,
                metadata={"answer": "4", "n": 3, "x": [1], "id": 7, "q": "?"},
            )
        ],
    )
    [row] = rows(tmp_path / "s.jsonl")
    assert row == {
        "step": 1, "split": "train", "id": "7/0/0", "group": "7/0", "tag": "math", "prompt": "?",
        "response": "größe\n🎉", "finish": "stop", "prompt_tokens": 1, "response_tokens": 7, "reward": 0.5,
        "detail": {"format": 1.0}, "version": 3, "metadata": {"answer": "4", "n": 3},
    }  # fmt: skip


def test_a_failed_reward_is_no_number(tmp_path: Path, open_file: Callable[..., SamplesFile]) -> None:
    file = open_file(tmp_path / "s.jsonl")
    file.write(
        1,
        [
            sample(0, 0, reward=Reward(value=None, failure="timed out")),
            sample(0, 1, "", versions=np.array([], np.int32)),
        ],
    )
    first, second = rows(tmp_path / "s.jsonl")
    assert (first["reward"], first["failure"]) == (None, "timed out")
    assert "reward" not in second
    assert second["response"] == ""


def test_only_first_samples_of_step_and_prompt_are_recorded(
    tmp_path: Path, open_file: Callable[..., SamplesFile]
) -> None:
    file = open_file(tmp_path / "s.jsonl")
    for step in (1, 2):
        file.write(step, [sample(0, index) for index in range(3)])
        file.write(step, [sample(group, index) for group in (1, 2) for index in range(6)])
        file.write(step, [sample(9, 9)])  # the step's allowance is used up
        file.write(step, [sample(8, 0)], split="val")
    found = [(row["step"], row["split"], row["id"]) for row in rows(tmp_path / "s.jsonl")]
    train = ["0/0/0", "0/0/1", "0/0/2", "1/0/0", "1/0/1", "1/0/2", "1/0/3", "2/0/0"]
    assert found == [
        (step, split, name)
        for step in (1, 2)
        for split, name in [*(("train", name) for name in train), ("val", "8/0/0")]
    ]


def test_long_columns_are_cut(tmp_path: Path, open_file: Callable[..., SamplesFile]) -> None:
    file = open_file(tmp_path / "s.jsonl")
    file.write(1, [sample(0, 0, metadata={"document": "x" * 10_000})])
    [row] = rows(tmp_path / "s.jsonl")
    assert row["metadata"] == {"document": "x" * 500 + "…"}


def test_a_resumed_run_keeps_the_samples_before_its_step(tmp_path: Path, open_file: Callable[..., SamplesFile]) -> None:
    (tmp_path / "before").mkdir()
    old = open_file(tmp_path / "before" / "new.jsonl")
    for step in range(1, 5):
        old.write(step, [sample(step, 0)])
    new = open_file(tmp_path / "new.jsonl", history=tmp_path / "before", resumed_step=2)
    new.write(3, [sample(33, 0)])
    assert [row["group"] for row in rows(tmp_path / "new.jsonl")] == ["1/0", "2/0", "33/0"]


def test_the_last_row_counts_the_samples_that_are_left_out(
    tmp_path: Path, open_file: Callable[..., SamplesFile]
) -> None:
    file = open_file(tmp_path / "s.jsonl")
    file.write(1, [sample(group, index) for group in range(4) for index in range(8)])
    file.write(2, [sample(0, index) for index in range(3)])
    first, second = ([row for row in rows(tmp_path / "s.jsonl") if row["step"] == step] for step in (1, 2))
    assert [row.get("left_out") for row in first] == [None] * 7 + [32 - 8]
    assert [row.get("left_out") for row in second] == [None] * 3


# -- images ------------------------------------------------------------------------------------------------------------


def png(value: int) -> Media:
    return image_media(Image.new("RGB", (3, 2), (value, 0, 0)))


def test_images_of_samples_are_stored_once_by_digest(tmp_path: Path, open_file: Callable[..., SamplesFile]) -> None:
    one, other = png(1), png(2)
    file = open_file(tmp_path / "samples.jsonl")
    file.write(1, [sample(0, 0, media=(one, other)), sample(0, 1, media=(one, one)), sample(1, 0)])
    first, second, third = rows(tmp_path / "samples.jsonl")
    saved = [{"digest": image.digest, "width": 3, "height": 2} for image in (one, other)]
    assert first["images"] == saved
    assert second["images"] == [saved[0], saved[0]]
    assert "images" not in third
    assert {path.name for path in (tmp_path / "media").iterdir()} == {one.digest, other.digest}
    assert MediaFolder(tmp_path).get(saved)[1].read() == other.data


def test_resumed_runs_link_the_images_of_their_history(tmp_path: Path) -> None:
    before, after = tmp_path / "1", tmp_path / "2"
    before.mkdir()
    after.mkdir()
    saved = MediaFolder(before).put([png(1)])
    folder = MediaFolder(after, history=before)
    for file in (before / "media").iterdir():
        file.unlink()
    assert folder.get(saved)[0].read() == png(1).data
    MediaFolder(tmp_path / "3", history=tmp_path / "without")
    assert not (tmp_path / "3").exists()


def test_images_that_cannot_be_stored_are_reported(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file")
    with raises_error(RunDirectoryError, "media"):
        MediaFolder(tmp_path).put([png(1)])
