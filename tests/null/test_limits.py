"""The table of limits and its page say the same; small files are read within their limits."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import pytest

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.small_file import parse_json, read_json, read_small

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"


def test_the_page_shows_every_limit() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    shown = {name: eval(value.replace("^", "**").replace(",", "")) for name, value in rows}
    assert shown == {name: value for name, value in vars(limits).items() if name.isupper()}


def test_a_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero", "."):
        with pytest.raises(ModelError, match=r"regular file|Is a directory"):
            read_json(tmp_path / name, ModelError)


def test_a_json_file_is_read_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path, ModelError) == {"a": 1}
    tracemalloc.start()  # what is allocated follows from the file, not from the limit
    read_json(path, ModelError)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(read_small(Path("/proc/self/status"), 1 << 20, ModelError)) > 100  # a regular file of unknown size
    monkeypatch.setattr(limits, "JSON_BYTES", 7)
    with pytest.raises(ModelError, match="larger than 7 bytes"):
        read_json(path, ModelError)


@pytest.mark.parametrize("text", ["[" * 10**6, "{", "1" * 10**5, b"\xff"], ids=["deep", "cut", "digits", "bytes"])
def test_what_is_no_json_is_an_error_with_its_name(text: str | bytes) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        parse_json("tokenizer.json", text, ModelError)
