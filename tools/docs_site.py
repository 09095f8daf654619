"""Hook of mkdocs: pages of the plugin interface from its docstrings, and links to files outside of docs/.

The Markdown files of docs/ are read on GitHub, too. There, links such as `../examples/quickstart/rewards.py` lead to
the file; the site names its path instead.
"""

from __future__ import annotations

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
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    config.nav.append({"Reference": [f"reference/{name}.md" for name in _modules()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each module of `roll_core.spec`."""
    for name in _modules():
        content = f"# `roll_core.spec.{name}`\n\n::: roll_core.spec.{name}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def _modules() -> list[str]:
    return sorted(path.stem for path in SPEC.glob("[a-z]*.py"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside of docs/ by their paths."""

    def path_of(found: re.Match[str]) -> str:
        text, path = found.groups()
        if not (ROOT / path).exists():
            log.warning("%s: there is no %s", page.file.src_uri, path)
        return f"{text} (`{path}`)"

    return OUTSIDE.sub(path_of, markdown)
