"""A clock that jumps: nothing that waits, or ends something, asks for the time of day."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import pyggml as gg

TIME_OF_DAY = re.compile(r"\btime\.time(_ns)?\b|\bfrom time import [^\n]*\btime\b|\bdatetime\.(now|utcnow|today)\b")
SHOWN = {  # what is told of the day, and ends nothing
    "serve/service.py": "`created` of models",
    "llm/openai/request.py": "`created` of answers",
    "llm/generate/jinja.py": "`strftime_now` of templates",
    "tools/measure/bench_history.py": "the date of a row",
}


def test_deadlines_ask_monotonic_clocks() -> None:
    root = Path(gg.__file__).parent
    folders = [root, *(p for p in (root.parent / "models", root.parent / "tools") if p.is_dir())]
    found = {
        str(p.relative_to(root if p.is_relative_to(root) else root.parent))
        for folder in folders
        for p in folder.rglob("*.py")
        if TIME_OF_DAY.search(p.read_text(encoding="utf-8"))
    }
    assert {f for f in found if f in SHOWN} >= set(list(SHOWN)[:3])
    assert found <= SHOWN.keys()


def test_texts_come_while_the_clock_jumps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gg.load_model(tiny) as model:
        want = list(model.generate("a", 8, temp=0.0, n_threads=2))
        jumps = iter([0.0, 4e9, -1e9] * 1000)
        monkeypatch.setattr(time, "time", lambda: next(jumps))
        assert list(model.generate("a", 8, temp=0.0, n_threads=2)) == want
