"""Sphinx: `sphinx-build docs out`. The pages' snippets run first, and draw the pictures that the pages show."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from readme import blocks  # noqa: E402

project = "pyggml"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.graphviz"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
graphviz_output_format = "svg"
exclude_patterns = ["pictures"]


def draw(_: Sphinx) -> None:
    """Run every page's snippets in docs/pictures, one namespace a page."""
    pictures = HERE / "pictures"
    pictures.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(pictures)
    for page in HERE.glob("*.md"):
        names: dict[str, object] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            for code in blocks(page, "python"):
                exec(compile(code, page.name, "exec"), names)
    os.chdir(before)


def as_written(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Docstrings are plain text, read as `help()` shows them: no markup is looked for."""
    lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", draw)
    app.connect("autodoc-process-docstring", as_written)
