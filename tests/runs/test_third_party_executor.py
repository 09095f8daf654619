"""An executor of another package runs what those of ROLL run, with the same numbers."""

import json


def test_a_grpo_run_on_it_equals_one_in_this_process(sockets):
    here = sockets.ok(sockets.rlvr(max_steps=2))
    there = sockets.ok(sockets.rlvr(max_steps=2) | {"executor": "sockets"})
    lines, expected = sockets.timeless(there), sockets.timeless(here)
    assert all(line.pop("weight_sync/copied_bytes") > 0 for line in lines)  # between processes
    assert all(line.pop("weight_sync/copied_bytes") == 0 for line in expected)
    assert lines == expected


def test_auto_takes_it_for_two_workers_by_its_priority(sockets):
    config = sockets.rlvr(max_steps=1) | {"executor": "auto"}
    config["rewards"]["digits"]["world_size"] = 2
    result = sockets.ok(config)
    assert json.loads(result.run_dir.record.read_text(encoding="utf-8"))["executor"] == "sockets"
