"""Every Python snippet of README and docs/ runs; what it prints is what the text says (`# ->` comments)."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from pyggml import limits

from .readme import README, ROOT, blocks

PAGES = [p for p in sorted((ROOT / "docs").glob("*.md")) if blocks(p, "python")]


def run(code: str, name: str, names: dict[str, object]) -> list[str]:
    """Execute a snippet; the texts that it should have printed and did not."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), names)
    expected = [line.split("# ->", 1)[1].strip() for line in code.splitlines() if "# ->" in line]
    return [f"{text!r} is not in {out.getvalue()!r}" for text in expected if text not in out.getvalue()]


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_snippet_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "# ->" in code, "a snippet shows what it prints"
    assert not run(code, "README.md", {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's snippets follow one another."""
    if '"cc"' in page.read_text() and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits, "JSON_BYTES", limits.JSON_BYTES)  # docs/limits.md raises it
    names: dict[str, object] = {}
    assert not [missing for code in blocks(page, "python") for missing in run(code, page.name, names)]
