"""Real little distributions: modules and a .dist-info in a folder of its own, as pip leaves them."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GOOD = """\
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider

ROLL_HOOK_API = 1
CAPABILITIES = InferCapabilities(weight_transports=("shared",))


@hookimpl
def roll_infer_strategies():
    yield InferProvider(
        name="{name}", target="{module}.strategy:Engine", summary="An engine for tests", capabilities=CAPABILITIES
    )
"""

CONFIG = """\
pipeline: rlvr
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
"""


class Site:
    """A folder on the path, with distributions in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()

    def install(self, package, version="1.0", *, source=GOOD, name="", module="", point="", files=None):
        """Install a distribution whose plugin module has `source`; `{name}` and `{module}` are filled in."""
        module = module or package.replace("-", "_")
        text = textwrap.dedent(source)
        if "{name}" in text:
            text = text.replace("{name}", name or package).replace("{module}", module)
        home = self.folder / module
        home.mkdir(exist_ok=True)
        (home / "__init__.py").write_text("")
        (home / "plugin.py").write_text(text)
        for path, content in {"strategy.py": "class Engine: pass\n", **(files or {})}.items():
            (home / path).write_text(textwrap.dedent(content))
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[roll.plugins]\n{point or package} = {module}.plugin\n")

    def environ(self):
        """This process' environment, with the folder on the path."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "PYTHONPATH": str(self.folder)}

    def roll_core(self, *arguments, cwd=None, **environ):
        """Run the command in a process of its own that sees this folder."""
        return subprocess.run(
            [sys.executable, "-c", "import sys; from roll_core.cli.main import main; sys.exit(main())", *arguments],
            env={**self.environ(), **environ},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def listing(self, *arguments, **environ):
        """`plugins --json` by package."""
        done = self.roll_core("plugins", "--json", *arguments, **environ)
        assert done.returncode == 0, done.stderr
        return {each["package"]: each for each in json.loads(done.stdout)["plugins"]}

    def check(self, *strategies, disable="", **environ):
        """`check` of one config for each infer strategy."""
        files = []
        for number, strategy in enumerate(strategies):
            file = self.folder / f"run{number}.yaml"
            file.write_text(CONFIG.replace("strategy_name: hf_infer", f"strategy_name: {strategy}"))
            files.append(file.name)
        return self.roll_core(
            "check", "--no-files", *files, *(("--disable-plugin", disable) if disable else ()), **environ
        )


@pytest.fixture(scope="session")
def new_site():
    """Makes a site in a folder that does not exist yet."""
    return Site


@pytest.fixture
def site(tmp_path, new_site):
    return new_site(tmp_path / "site")


@pytest.fixture
def importable(site, monkeypatch):
    """The folder is on this process' path too; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(site.folder))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(site.folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
