"""The doctor itself: which checks it runs, and that none of them can harm it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PluginLoadError
from roll_core.plugins.loader import Plugin
from roll_core.spec.diagnostics import CheckContext, CheckResult
from roll_core.spec.platform import Probe
from roll_core.spec.providers import (
    AdvantageProvider,
    ExecutorProvider,
    PlatformProvider,
    Provider,
    RewardProvider,
    TrackerProvider,
    TrainProvider,
    WeightTransportProvider,
)
from roll_executor_ray.plugin import roll_checks
from roll_testing.errors import mentions
from roll_tools.examination import DoctorFinding

Doctor = Callable[..., list[DoctorFinding]]


class Absent(CpuPlatform):
    name = "absent"

    def probe(self) -> Probe:
        return Probe(found=False, why="no board in the slot")


class Broken(CpuPlatform):
    name = "broken"

    def probe(self) -> Probe:
        raise SystemExit("its driver called exit")


def of(findings: list[DoctorFinding], check: str) -> dict[str, CheckResult]:
    return {each.result.subject: each.result for each in findings if each.check == check}


def fine(_: CheckContext) -> Iterator[CheckResult]:
    yield CheckResult(level="ok", found="it is well")


def config(**keys: Any) -> Any:
    from roll_core.pipelines.config import SFTConfig

    role = {"data_args": {"file_name": "rows.jsonl"}, "strategy_args": {"strategy_name": "acme_train"}}
    return SFTConfig.model_validate({"pipeline": "sft", "sft_train": role, **keys})


def raises(_: CheckContext) -> Any:
    raise RuntimeError("the tool is broken")


def leaves(_: CheckContext) -> Any:
    raise SystemExit(3)


def hangs(_: CheckContext) -> Any:
    threading.Event().wait()


def yields_text(_: CheckContext) -> Any:
    yield "all is well"


def yields_numbers(_: CheckContext) -> Any:
    yield CheckResult(level="ok", found=42)  # type: ignore[arg-type]


def yields_another_level(_: CheckContext) -> Any:
    yield CheckResult(level="fatal", found="x")  # type: ignore[arg-type]


def breaks_halfway(_: CheckContext) -> Any:
    yield CheckResult(level="ok", found="so far")
    raise KeyError("left")


def returns_nothing(_: CheckContext) -> None:
    return None


def forgets_the_remedy(_: CheckContext) -> Any:
    yield CheckResult(level="error", found="broken")


BAD = {
    raises: "RuntimeError: the tool is broken",
    leaves: "SystemExit: 3",
    hangs: "no result within 3 s",
    yields_text: "it yielded str, expected CheckResult",
    yields_numbers: "result's found is",
    yields_another_level: "'fatal', expected ok, note, warning, error",
    breaks_halfway: "KeyError: 'left'",
    returns_nothing: "TypeError",
    forgets_the_remedy: "ValueError",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda function: function.__name__)
def test_a_check_that_fails_is_a_finding_and_harms_no_other(doctor: Doctor, bad: Any) -> None:
    found = doctor({"bad": bad, "good": fine}, deadline_s=3.0 if bad is hangs else 20.0)
    assert of(found, "good")[""].level == "ok"
    failed = of(found, "bad")[""]
    assert failed.level == "warning"
    assert BAD[bad] in failed.found
    assert mentions(failed.remedy, "acme")


def test_a_check_whose_module_cannot_be_imported_is_a_finding(doctor: Doctor) -> None:
    from roll_core.spec.providers import CheckProvider

    found = doctor(records=(CheckProvider(name="gone", target="no_such_module:check", summary=""),))
    assert "no_such_module" in of(found, "gone")[""].found


def test_output_of_a_check_is_not_printed(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    def talks(_: CheckContext) -> Iterator[CheckResult]:
        sys.stdout.write("hello")
        yield CheckResult(level="ok", found="quiet")

    doctor({"talks": talks})
    assert capsys.readouterr().out == ""


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=50)
@given(answer=st.lists(st.one_of(st.none(), st.text(), st.integers(), st.binary(), st.floats(), st.just(...))))
def test_any_check_reply_becomes_findings(doctor: Doctor, answer: list[Any]) -> None:
    found = of(doctor({"odd": lambda _: answer}), "odd")
    assert all(result.level == "warning" for result in found.values())
    assert bool(found) is bool(answer)


# -- platforms ---------------------------------------------------------------------------------------------------------


def test_every_platform_reports_why_it_was_or_was_not_chosen(doctor: Doctor) -> None:
    found = of(
        doctor(platforms={"cpu": (CpuPlatform, 0), "absent": (Absent, 10), "other": (CpuPlatform, -1)}), "platform"
    )
    assert (found["cpu"].level, found["cpu"].wanted) == ("ok", "selected")
    assert (found["absent"].level, found["absent"].found) == ("note", "no board in the slot")
    assert (found["other"].level, found["other"].wanted) == ("note", "available, not selected")


def test_missing_platform_named_in_the_config_is_an_error(doctor: Doctor) -> None:
    platforms = {"cpu": (CpuPlatform, 0), "absent": (Absent, 10)}
    found = of(doctor(platforms=platforms, config=config(platform="absent")), "platform")
    assert found["absent"].level == "error"
    assert found["cpu"].level == "note"


def test_a_tie_is_an_error_that_names_the_choice(doctor: Doctor) -> None:
    found = of(doctor(platforms={"one": (CpuPlatform, 5), "two": (CpuPlatform, 5)}), "platform")
    assert sorted(result.level for result in found.values()) == ["error", "ok"]
    assert "platform: two or platform: one" in found["two"].remedy


def test_a_probe_that_ends_the_program_is_a_finding(doctor: Doctor) -> None:
    found = of(doctor(platforms={"cpu": (CpuPlatform, 0), "broken": (Broken, 10)}), "platform")
    assert found["broken"].level == "warning"
    assert "its driver called exit" in found["broken"].found
    assert found["cpu"].wanted == "selected"


def test_checks_of_a_platform_run_where_it_is_chosen(doctor: Doctor) -> None:
    platforms = {"cpu": (CpuPlatform, 0), "absent": (Absent, 10)}
    assert of(doctor({"mine": fine}, platforms, check_platform="cpu"), "mine")
    assert not of(doctor({"mine": fine}, platforms, check_platform="absent"), "mine")
    assert of(doctor({"mine": fine}, platforms, check_platform="absent", config=config(platform="absent")), "mine")


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_a_plugin_that_failed_to_load_is_shown_with_its_cause(doctor: Doctor) -> None:
    error = PluginLoadError("plugin beta 2: importing beta failed: ImportError: no libbeta")
    broken = Plugin(package="beta", version="2", entry_point="beta", target="beta", state="failed", error=error)
    found = of(doctor(more=(broken,)), "plugin")
    assert found["beta 2"].level == "warning"
    assert "no libbeta" in found["beta 2"].found
    assert "--disable-plugin beta" in found["beta 2"].remedy


def strategy(needs: str | tuple[str, ...]) -> TrainProvider:
    return TrainProvider(name="acme_train", target="acme:Train", summary="", needs=(needs,))


def test_missing_engine_is_an_error_only_if_configured(doctor: Doctor) -> None:
    records = (strategy("no-such-engine>=2,<3"),)
    found = of(doctor(records=records), "requirements")["acme_train"]
    assert found.level == "warning"
    assert found.wanted == "no-such-engine>=2,<3"
    assert "pip install 'no-such-engine" in found.remedy
    assert of(doctor(records=records, config=config()), "requirements")["acme_train"].level == "error"
    other = {"data_args": {"file_name": "rows.jsonl"}, "strategy_args": {"strategy_name": "hf_train"}}
    unused = doctor(records=records, config=config(sft_train=other))
    assert of(unused, "requirements")["acme_train"].level == "note"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (ExecutorProvider, {"executor": "acme"}),
        (RewardProvider, {"rewards": {"math": {"reward": "acme"}}}),
        (AdvantageProvider, {"adv_estimator": "acme"}),
        (WeightTransportProvider, {"weight_transport": "acme"}),
        (TrackerProvider, {"track_with": ["acme"]}),
    ],
)
def test_every_part_that_a_config_names_is_used(doctor: Doctor, kind: type[Provider], keys: dict[str, Any]) -> None:
    from roll_core.pipelines.config import RLVRConfig

    role = {"data_args": {"file_name": "rows.jsonl"}, "strategy_args": {"strategy_name": "hf_train"}}
    record = kind(name="acme", target="acme:Acme", summary="", needs=("no-such-library",))
    rewards = {"math": {"reward": "other"}}
    base = {"pipeline": "rlvr", "actor_train": role, "actor_infer": {}, "rewards": rewards}
    levels = []
    for named in ({}, keys):
        config = RLVRConfig.model_validate({**base, **named})
        levels.append(of(doctor(records=(record,), config=config), "requirements")["acme"].level)
    assert levels == ["note", "error"]


def test_wrong_engine_version_is_shown_with_the_required_one(doctor: Doctor) -> None:
    found = of(doctor(records=(strategy("pluggy>=99"),)), "requirements")["acme_train"]
    assert mentions(found.found, "pluggy", ">=99")


def test_an_engine_that_is_there_is_fine(doctor: Doctor) -> None:
    assert of(doctor(records=(strategy("pluggy>=1"),)), "requirements")["acme_train"].level == "ok"


def test_engine_is_found_under_any_of_its_package_names(doctor: Doctor) -> None:
    found = of(doctor(records=(strategy(("no-such-engine>=1", "pluggy>=1")),)), "requirements")["acme_train"]
    assert (found.level, found.wanted) == ("ok", "no-such-engine>=1 or pluggy>=1")


def test_requirement_of_an_absent_platform_is_no_warning(doctor: Doctor) -> None:
    record = PlatformProvider(name="board", target="acme:Board", summary="", needs=("no-such-driver>=1",))
    assert of(doctor(records=(record,)), "requirements")["board"].level == "note"


# -- Python environments -----------------------------------------------------------------------------------------------


def test_role_environment_is_checked_instead_of_this_one(doctor: Doctor) -> None:
    train = TrainProvider(name="acme_train", target="acme:Train", summary="", needs=("acme-engine",))
    core = Plugin(
        package="roll-core", version="1", entry_point="roll-core", target="", state="loaded", providers=(train,)
    )

    def found(environment: Any) -> tuple[CheckResult, CheckResult]:
        role = {"data_args": {"file_name": "rows.jsonl"}, "strategy_args": {"strategy_name": "acme_train"}}
        findings = doctor(
            records=roll_checks(), more=(core,), config=config(sft_train=role | {"environment": environment})
        )
        return of(findings, "requirements")["acme_train"], of(findings, "environments")["sft_train"]

    needs, environment = found("/nowhere/env")
    assert needs.level == "note"
    assert environment.level == "error"
    assert environment.found == ("sft_train: environment /nowhere/env: there is no interpreter /nowhere/env/bin/python")
    assert environment.remedy.startswith("uv venv /nowhere/env && uv pip install --python /nowhere/env/bin/python ")
    _, environment = found(sys.executable)
    assert (environment.level, environment.found) == ("ok", sys.executable)
    _, environment = found({"packages": ["acme-engine==2"]})
    assert (environment.level, environment.found) == ("note", "uv installs acme-engine==2 when the role first starts")
