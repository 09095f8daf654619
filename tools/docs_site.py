"""Hook of mkdocs: pages of the plugin interface, the index of plugins, their examples, and links out of docs/.

The Markdown files of docs/ are read on GitHub, too. There, links such as `../examples/quickstart/rewards.py` lead to
the file; the site names its path instead.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "packages" / "roll-core" / "src" / "roll_core" / "spec"
FURTHER = ("roll_core.errors", "roll_core.types", "roll_modeling.model")
"""Modules with a reference page besides those of `SPEC`."""
INDEX = "plugin-index.md"
LANGUAGES = {".py": "python", ".toml": "toml"}
TEMPLATES = ROOT / "packages" / "roll-testing" / "src" / "roll_testing" / "templates"
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    (plugins,) = (section["Plugins"] for section in config.nav if "Plugins" in section)
    plugins += [INDEX, {"Examples": [f"examples/{kind}.md" for kind in _kinds()]}]
    plugins.append({"Modules": [f"reference/{name}.md" for name in _modules()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each module of the reference and for each kind of plugin, and the index of plugins."""
    files.append(File.generated(config, INDEX, content=plugin_index()))
    for kind in _kinds():
        files.append(File.generated(config, f"examples/{kind}.md", content=example(kind)))
    for name, module in _modules().items():
        content = f"# `{module}`\n\n::: {module}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def plugin_index() -> str:
    """Page with the installed plugins, this repository's first, the hooks that they implement, and their names."""
    from roll_core.plugins.records import KINDS
    from roll_core.plugins.registry import load_registry

    own = {path.name for path in (ROOT / "packages").iterdir()}
    lines = [
        "# Index of plugins",
        "",
        "Each package is a distribution of its own. `roll-core plugins -v` lists those installed.",
    ]
    for plugin in sorted(load_registry().plugins, key=lambda each: (each.package not in own, each.package)):
        metadata = importlib.metadata.metadata(plugin.package)
        other = "" if plugin.package in own else f" Version {plugin.version}, not of this repository."
        lines += ["", f"## {plugin.package}", "", f"{(metadata['Summary'] or '').rstrip('.')}.{other}", ""]
        provided = {kind.hook: [each for each in plugin.providers if type(each) is kind.record] for kind in KINDS}
        for hook in plugin.hooks:
            lines.append(f"- [`{hook}()`](reference/hooks.md)")
            lines += [f"    - `{each.name}`: {each.summary}" for each in provided.get(hook, [])]
    return "\n".join(lines) + "\n"


def example(kind: str) -> str:
    """Page with the files of the package that `roll-core new KIND acme` writes: the templates, so there is one copy."""
    folder = TEMPLATES / kind
    lines = [
        f"# Example: {kind}",
        "",
        f"    roll-core new {kind} acme",
        "",
        "The command writes these files, a licence and a workflow for GitHub. The tests pass as they are. See",
        "[writing a plugin](../plugins.md) and [the conformance tests](../conformance.md).",
    ]
    for path in sorted(folder.rglob("*"), key=lambda each: (len(each.parts), each)):
        if path.suffix in LANGUAGES and path.name != "__init__.py" and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8").rstrip()
            lines += ["", f"## `{path.relative_to(folder)}`", "", f"````{LANGUAGES[path.suffix]}", text, "````"]
    return "\n".join(lines) + "\n"


def _kinds() -> list[str]:
    return sorted(path.name for path in TEMPLATES.iterdir() if path.name != "shared" and not path.name.startswith("_"))


def _modules() -> dict[str, str]:
    """Module of each page of the reference."""
    spec = sorted(path.stem for path in SPEC.glob("[a-z]*.py"))
    return {name: f"roll_core.spec.{name}" for name in spec} | {name: name for name in FURTHER}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside of docs/ by their paths."""
    if "/" in page.file.src_uri:
        return markdown  # a generated page in a folder: `../` is docs/

    def path_of(found: re.Match[str]) -> str:
        text, path = found.groups()
        if not (ROOT / path).exists():
            log.warning("%s: there is no %s", page.file.src_uri, path)
        return f"{text} (`{path}`)"

    return OUTSIDE.sub(path_of, markdown)
