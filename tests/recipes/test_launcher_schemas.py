"""The launchers by the schemas of their own tools: `./run test-engines launchers`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCHERS = Path(__file__).parents[2] / "launchers"

pytestmark = [
    pytest.mark.engine("sky"),
    # pulled in by SkyPilot
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def test_shellcheck_passes():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = sorted(map(str, LAUNCHERS.glob("*.sh")))
    done = subprocess.run([str(shellcheck), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_compose_parses_the_file_and_refuses_a_mistake_in_it():
    from compose_spec import PyCompose

    text = (LAUNCHERS / "compose.yaml").read_text()
    read = PyCompose.from_yaml(text)
    read.validate()
    assert read.service_names() == ["run"]
    for right, wrong in (("shm_size: 10gb", "shm_size: much"), ("command:", "command: {a: 1}\n    labels:")):
        assert right in text
        with pytest.raises(ValueError, match="services"):
            PyCompose.from_yaml(text.replace(right, wrong))


def pods():
    cluster = yaml.safe_load((LAUNCHERS / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **each["template"]} for each in groups]


@pytest.mark.parametrize("at", [0, 1])
def test_kubernetes_schema_accepts_the_ray_job_pods(at):
    import kubernetes_validate

    pod = pods()[at]
    kubernetes_validate.validate(pod, "1.37", strict=True)
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.37", strict=True)


def test_skypilot_reads_the_task_and_refuses_an_unknown_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(LAUNCHERS.parent)
    import sky

    config = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
    task = sky.Task.from_yaml_config(dict(config), env_overrides=[("STORE", "s3://bucket/roll")])
    (resources,) = task.resources
    assert dict(resources.accelerators) == {"H100": 8}
    assert resources.use_spot
    with pytest.raises(ValueError, match="STORE"):
        sky.Task.from_yaml_config(dict(config))
    with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError):
        sky.Task.from_yaml_config(config | {"resource": {}})
