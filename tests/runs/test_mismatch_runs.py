"""Runs whose engine and trainer disagree record their logprobs, and `roll-core doctor mismatch RUN` reads them."""

import json

from roll_core.cli.main import main
from roll_testing.errors import mentions


def examine(capsys, run, *options) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["doctor", "mismatch", str(run), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_tripped_guard_names_the_cause_and_the_command(local_runs, capsys, monkeypatch):
    from dataclasses import replace

    from roll_infer_hf.engine import HFInferStrategy

    generate = HFInferStrategy.generate

    async def first_is_wrong(self, request):
        completion = await generate(self, request)
        outputs = tuple(replace(output, logprobs=output.logprobs * 1.0) for output in completion.outputs)
        for output in outputs:
            output.logprobs[:1] -= 1.0
        return replace(completion, outputs=outputs)

    monkeypatch.setattr(HFInferStrategy, "generate", first_is_wrong)
    guards = {"logprob_probe": "off", "logprob_gap": {"error_threshold": 9.0}}
    result = local_runs.ok(local_runs.rlvr(max_steps=2, guards=guards))
    event = json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]["events"][0]
    assert mentions(event["message"], "tokens.first", str(result.run_dir.path))
    code, found = examine(capsys, result.run_dir.path, "--step", "1")
    assert code == 1
    assert found["causes"][0]["name"] == "tokens.first"
    assert examine(capsys, result.run_dir.path, "--threshold", "9")[0] == 0


def test_recorded_rollouts_have_the_logprobs_of_each_step(local_runs, capsys):
    result = local_runs.ok(local_runs.rlvr(max_steps=2, record_rollouts=True))
    assert sorted(file.name for file in (result.run_dir.path / "logprobs").iterdir()) == [
        "step-1.jsonl",
        "step-2.jsonl",
    ]
    code, found = examine(capsys, result.run_dir.path)
    assert (code, found["causes"], found["ok"]) == (0, [], True)


def test_runs_whose_sides_agree_record_nothing(local_runs):
    result = local_runs.ok(local_runs.rlvr(max_steps=1))
    assert not (result.run_dir.path / "logprobs").exists()
