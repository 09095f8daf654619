"""Cause of a process's exit, from Ray's messages: recorded from Ray 2.60, except for the ids."""

import pytest

from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError
from roll_executor_ray.actors import interface_of
from roll_executor_ray.exit_causes import MAX_QUOTE, exit_cause

CUT_OFF = """The actor died unexpectedly before finishing this task.
\tclass_name: RayHost
\tactor_id: 5ed1
The actor died because its node has died. Node Id: 76fc46e2f724
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
DRAINED = "The actor died because its node has died. Node Id: 76fc\n\tthe actor's node was terminated: preempted\nbye"
KILLED = """The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) OOM"""


class AskedForeign(Exception):
    cause = ProcessEndedError("ended with exit code 3")


@pytest.mark.parametrize(
    ("error", "known", "cause"),
    [
        (
            RuntimeError(CUT_OFF),
            {"oom_kills": 2},
            "Ray reports that its host is lost or unreachable: health check failed due to missing too many heartbeats",
        ),
        (RuntimeError(CUT_OFF), {"pid": 0}, "Ray reports that its host is lost or unreachable: health check failed"),
        (RuntimeError(DRAINED), {}, "Ray reports that its host is lost or unreachable: preempted"),
        (
            RuntimeError(KILLED),
            {},
            "process 7 exited, most likely killed (SIGKILL): Worker unexpectedly exits with a connection error code 2."
            " End of file.",
        ),
        (
            RuntimeError(KILLED),
            {"oom_kills": 1},
            "process 7 exited, and the kernel killed 1 processes",
        ),
        (RuntimeError(KILLED), {"trace": "x\nFatal Python error: Aborted\n\nThread"}, "process 7 crashed: Aborted"),
        (RuntimeError("no room"), {"pid": 0}, "its process did not start: no room"),
        (AskedForeign(), {}, "process 7 ended with exit code 3"),
        (RuntimeError(), {}, "process 7 exited, most likely killed (SIGKILL): RuntimeError"),
    ],
)
def test_the_nearest_cause_is_named_on_one_line(error, known, cause):
    found = exit_cause(error, **({"pid": 7, "trace": "", "oom_kills": 0} | known))
    assert found.startswith(cause)
    assert "\n" not in found


def test_ray_is_quoted_at_no_more_than_a_few_lines():
    cause = exit_cause(RuntimeError("word " * 1000), pid=7, trace="", oom_kills=0)
    assert len(cause) < MAX_QUOTE + 60
    assert cause.endswith("…")


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1").startswith("lo")
    assert interface_of("203.0.113.1") == ""  # of a range that is kept for documentation
