"""Every Python snippet of the README runs; what it prints is what the README says (`# ->` comments)."""

from __future__ import annotations

import contextlib
import io

import pytest

from .readme import blocks


@pytest.mark.parametrize("code", blocks("python"))
def test_snippet_runs(code: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    expected = [line.split("# ->", 1)[1].strip() for line in code.splitlines() if "# ->" in line]
    assert expected, "a snippet shows what it prints"
    for text in expected:
        assert text in out.getvalue()
