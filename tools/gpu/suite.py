"""`./run gpu`: everything that only an accelerator can show, in one command that writes results after each part.

    ./run gpu [--device PLATFORM] [--rehearsal] [--only PART ...] [--out FOLDER] [--system-python [--wheels FOLDER]]

Each part is a process of its own with a deadline, so one that fails or hangs does not stop the next. `--rehearsal` runs
the parts with tiny shapes and judges no speed or accuracy; `--device cpu` implies it. What a CPU cannot show is then
listed as such, never as passed. `--system-python` uses the machine's own Python and torch and installs nothing but the
wheels in `--wheels`.
This file needs only the standard library: it records what is missing instead of failing for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SITE = REPOSITORY / ".gpu" / "site"
"""Wheels and package descriptions for `--system-python`."""
NEEDED = ("core", "modeling", "strategy-hf", "infer-hf", "weight-transports", "tools", "testing")
"""Packages of this repository that most parts import."""
NOT_RUN = 77
"""Exit code of a part that cannot run here; its last line says why."""
REHEARSAL = "ROLL_GPU_REHEARSAL"
"""Environment variable of the parts' processes; set: tiny shapes."""
MAX_ERROR_LINES = 40
"""Lines of a failed part's output that the result file keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of the suite."""

    name: str
    command: tuple[str, ...]
    """Arguments for Python; `{device}` is filled in."""
    deadline_s: float
    """A rehearsal has `REHEARSAL_S`."""
    modules: tuple[str, ...] = ()
    """Modules that must be importable."""
    needs_device: str = ""
    """Why a CPU cannot show it; empty if it can."""


REHEARSAL_S = 450.0
"""Deadline of a part of a rehearsal: its CPU time is below 90 s, but tests may share their cores."""


def kit(
    name: str, select: str, *, deadline_s: float = 600.0, modules: tuple[str, ...] = (), needs_device: str = ""
) -> Part:
    """A conformance kit on the device."""
    command = (str(HERE / "programs.py"), "kit", "--device", "{device}", "--select", select)
    return Part(name=f"kit {name}", command=command, deadline_s=deadline_s, modules=modules, needs_device=needs_device)


def program(
    name: str, *arguments: str, deadline_s: float = 300.0, modules: tuple[str, ...] = (), device: str = ""
) -> Part:
    """A function of `programs.py`."""
    command = (str(HERE / "programs.py"), name, "--device", "{device}", *arguments)
    return Part(
        name=" ".join([name.replace("_", " "), *arguments[1::2]]),
        command=command,
        deadline_s=deadline_s,
        modules=modules,
        needs_device=device,
    )


def timing(name: str, *arguments: str, deadline_s: float = 420.0, device: str = "") -> Part:
    """A function of `timings.py`."""
    command = (str(HERE / "timings.py"), name, "--device", "{device}", *arguments)
    return Part(
        name=" ".join(["bench", name, *arguments[1::2]]), command=command, deadline_s=deadline_s, needs_device=device
    )


PARTS: tuple[Part, ...] = (
    program("probe"),
    # What was broken on devices before any ran: seconds each, so that a loan that ends early has them.
    program("decode"),
    program("quickstart", deadline_s=600.0),
    program("resume"),
    program("sleep", device="memory of a device beside the host's"),
    kit("hf_train", "HFTrain"),
    kit("fsdp2_train", "FSDP2"),
    kit("deepspeed_train", "DeepSpeed", modules=("deepspeed",)),
    kit(
        "megatron_train", "Megatron", modules=("megatron.core",), needs_device="the kit runs beside the engine on CPUs"
    ),
    kit("hf_infer, torch's operators", "HFInferTorch"),
    kit("hf_infer, compiled kernels", "HFInferCompiled"),
    program("transport", "--which", "shared"),
    program("transport", "--which", "cuda_ipc", device="memory of a device that two processes share"),
    program("transport", "--which", "collective", device="two devices"),
    program("offload", device="memory of a device beside the host's"),
    program("numerics"),
    program("planner", device="memory of a device beside the host's"),
    program("extensions"),
    timing("sft_step", "--model", "0.6B"),
    timing("sft_step", "--model", "1.7B", device="1.7 billion parameters"),
    timing("rollout", "--model", "0.6B"),
    timing("sync", "--model", "1.7B"),
    timing("grpo_step", "--model", "0.6B"),
    timing("grpo_step", "--model", "1.7B", device="1.7 billion parameters"),
    timing("attention"),
)


def main() -> int:
    """Run the parts in order. 0 if none failed, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="./run gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", metavar="PLATFORM", default="cuda", help="cuda, rocm, npu or another package's; cpu: a rehearsal"
    )
    parser.add_argument("--rehearsal", action="store_true", help="tiny shapes; no speed or accuracy is judged")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose names contain one of these")
    parser.add_argument(
        "--out", type=Path, help="folder of the results; benchmarks/results/gpu, or output/gpu of a rehearsal"
    )
    parser.add_argument("--system-python", action="store_true", help="the machine's own Python, torch and transformers")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what that Python lacks")
    arguments = parser.parse_args()
    if arguments.wheels is not None and not arguments.system_python:
        parser.error("--wheels needs --system-python: otherwise uv installs what is missing")
    chosen = [each for each in PARTS if not arguments.only or any(word in each.name for word in arguments.only)]
    if not chosen:
        parser.error(
            f"no part's name contains {' or '.join(arguments.only)}; parts: {', '.join(p.name for p in PARTS)}"
        )
    environ = dict(os.environ)
    if arguments.system_python:
        environ |= system_site(arguments.wheels)
        if missing := missing_packages([str(SITE), *sys.path]):
            print(f"./run gpu: {sys.executable} has no {', '.join(missing)}", file=sys.stderr)
            print("Give their wheels with --wheels FOLDER; docs/gpu.md has the command.", file=sys.stderr)
            return 2
    rehearsal = arguments.rehearsal or arguments.device == "cpu"
    environ |= {REHEARSAL: "1"} if rehearsal else {}
    out = arguments.out or REPOSITORY / ("output/gpu" if rehearsal else "benchmarks/results/gpu")
    results = Results(out, arguments.device, rehearsal=rehearsal)
    for part in chosen:
        print(f"{part.name} …", end=" ", flush=True)
        entry = run_part(part, arguments.device, environ, out / "logs")
        results.add(part, entry)
        print(f"{entry['status']} ({entry['seconds']:.0f} s)", flush=True)
    print(f"\nresults: {results.markdown}")
    return 1 if any(each["status"] in ("failed", "timed out") for each in results.parts) else 0


def system_site(wheels: Path | None) -> dict[str, str]:
    """Environment in which the machine's Python finds this repository's packages, their plugins, and the wheels.

    Nothing is downloaded. A `.dist-info` with the entry points is what makes a package a plugin.
    """
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    found = sorted(wheels.glob("*.whl")) if wheels is not None else []
    if wheels is not None and not found:
        sys.exit(f"./run gpu: {wheels} holds no wheels")
    if found:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*install, "--target", str(SITE), *map(str, found)], check=True)
    sources = []
    for file in sorted((REPOSITORY / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        info = SITE / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        plugins = project.get("entry-points", {}).get("roll.plugins", {})
        points = "".join(f"{name} = {target}\n" for name, target in plugins.items())
        (info / "entry_points.txt").write_text(f"[roll.plugins]\n{points}", encoding="utf-8")
        sources.append(str(file.parent / "src"))
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"PYTHONPATH": os.pathsep.join([*sources, str(SITE), *before])}


def missing_packages(path: Sequence[str]) -> list[str]:
    """Names of the distributions that `NEEDED` require and that are not on `path`, in order.

    A wheel is installed without its requirements, so those without a condition are looked for, too.
    """
    found = list(metadata.distributions(path=list(path)))
    distributions = {normalised(name): each for each in reversed(found) if (name := each.metadata["Name"])}
    remaining = [f"roll-{name}" for name in NEEDED]
    seen, missing = set(), set()
    while remaining:
        requirement = remaining.pop()
        name = normalised(requirement)
        if requirement in seen or name in missing:
            continue
        seen.add(requirement)
        if name.startswith("roll-"):
            remaining += required_by(name, re.findall(r"[\w-]+", requirement.partition("[")[2].partition("]")[0]))
        elif name not in distributions:
            missing.add(name)
        elif Path(str(distributions[name].locate_file(""))) == SITE:
            remaining += [each for each in distributions[name].requires or [] if ";" not in each]
    return sorted(missing)


def required_by(package: str, extras: Sequence[str]) -> list[str]:
    """Requirements of a package of this repository with these extras."""
    project = tomllib.loads((REPOSITORY / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    optional = project.get("optional-dependencies", {})
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def normalised(requirement: str) -> str:
    """Name at the beginning of a requirement, as PEP 503 writes it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


def run_part(part: Part, device: str, environ: Mapping[str, str], logs: Path) -> dict[str, Any]:
    """Run one part in a process group of its own and return its entry of the result file."""
    if device == "cpu" and part.needs_device:
        return {"status": "needs a device", "seconds": 0.0, "why": part.needs_device}
    if missing := missing_modules(part.modules, environ):
        return {"status": "not installed", "seconds": 0.0, "why": ", ".join(missing)}
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{part.name.replace(' ', '-').replace(',', '').replace(chr(39), '')}.txt"
    command = [sys.executable, *(word.replace("{device}", device) for word in part.command)]
    path = os.pathsep.join([str(HERE), str(REPOSITORY / "benchmarks"), str(REPOSITORY), environ.get("PYTHONPATH", "")])
    deadline_s = REHEARSAL_S if REHEARSAL in environ else part.deadline_s
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={
                **environ,
                "PYTHONPATH": path.rstrip(os.pathsep),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    entry: dict[str, Any] = {"status": "passed", "seconds": round(time.monotonic() - begun, 1), **_last_json(lines)}
    if code is None:
        entry |= {"status": "timed out", "why": f"not done within {deadline_s:g} s", "output": lines[-MAX_ERROR_LINES:]}
    elif code == NOT_RUN:
        entry["status"] = "not run"
    elif code:
        entry |= {"status": "failed", "exit_code": code, "output": lines[-MAX_ERROR_LINES:]}
    return entry


def missing_modules(modules: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Those that a part's process cannot import."""
    paths = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    missing = []
    for module in modules:
        top = module.partition(".")[0]
        if importlib.util.find_spec(top) is None and not any((Path(each) / top).exists() for each in paths):
            missing.append(module)
    return missing


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the part and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_json(lines: Sequence[str]) -> dict[str, Any]:
    """The object on the last line that is one; empty if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else {}
    return {}


class Results:
    """One JSON and one Markdown file, written again after every part."""

    def __init__(self, out: Path, device: str, *, rehearsal: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.machine = machine(device)
        self.device, self.rehearsal = device, rehearsal
        self.parts: list[dict[str, Any]] = []
        name = f"{device}-rehearsal" if rehearsal else _file_name(str(self.machine["gpu"]))
        self.json, self.markdown = out / f"{name}.json", out / f"{name}.md"

    def add(self, part: Part, entry: Mapping[str, Any]) -> None:
        """Add one part's entry and write both files."""
        self.parts.append({"part": part.name, **entry})
        whole = {"device": self.device, "rehearsal": self.rehearsal, "machine": self.machine, "parts": self.parts}
        self.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        self.markdown.write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        about = self.machine
        rows = [f"| {p['part']} | {p['status']} | {p['seconds']:.0f} | {_told(p)} |" for p in self.parts]
        title = f"rehearsal on platform {self.device}, tiny shapes" if self.rehearsal else about["gpu"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        return "\n".join(
            [
                f"# {title}",
                "",
                f"Driver {about['driver']}, Python {about['python']}, {versions}; commit {about['commit']}.",
                "",
                "| part | status | s | figures |",
                "|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _told(entry: Mapping[str, Any]) -> str:
    figures = [f"{name} {_number(value)}" for name, value in entry.get("figures", {}).items()]
    aims = [
        f"{aim['what']} {_number(aim['value'])}, aim {aim['aim']}: {'met' if aim['met'] else 'missed'}"
        for aim in entry.get("aims", ())
    ]
    why = [entry["why"]] if entry.get("why") else []
    return "; ".join([*aims, *figures, *why]).replace("|", "\\|")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _file_name(gpu: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in gpu.lower()).strip("-") or "cuda"


def machine(device: str) -> dict[str, Any]:
    """GPU, driver, versions and commit. No host name and no path. Accelerators of others have the platform's name."""
    from importlib import metadata

    query = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    fields = [each.strip() for each in query.splitlines()[0].split(",")] if query else []
    if device != "cuda" or not fields:
        fields = ["none" if device in ("cpu", "cuda") else device, "none", ""]
    versions = {}
    for name in ("torch", "transformers", "ray", "deepspeed", "megatron-core", "vllm", "trl", "flash-attn"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _output("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD")
    return {
        "gpu": fields[0],
        "driver": fields[1],
        "gpu_memory": fields[2],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit or "unknown",
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
