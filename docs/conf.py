"""Sphinx: `make docs`.

The source is the whole checkout, so that pages link to README, `etc/` and the code as they do
when they are read on a forge; only what `include_patterns` names is a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import normpath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import made_pages

from llmgw import __version__

made_pages.make()

project = "llmgw"
author = "the llmgw contributors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md", "benchmarks/README.md"]
exclude_patterns = [".venv/**", "build/**"]
root_doc = "docs/index"
html_theme = "furo"
html_title = f"llmgw {__version__}"
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.strikethrough"]


def contents(app: Any, docname: str, source: list[str]) -> None:
    """Make the tree of contents from the lists of the index page, which so stays plain to read."""
    if docname != root_doc:
        return
    trees, caption = [], ""
    for line in source[0].splitlines():
        pages = [normpath(f"docs/{page}") for page in re.findall(r"\]\(([^)#]+)\.md\)", line)]
        if line and not line.startswith(("-", "#", " ")):
            caption = line
        if pages and line.startswith(("-", " ")):
            trees.append((caption, pages))
    text = ""
    for heading in dict.fromkeys(caption for caption, _ in trees):
        entries = "\n".join(f"/{page}" for caption, pages in trees for page in pages if caption == heading)
        text += f"\n\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{entries}\n```\n"
    source[0] += text


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", contents)
