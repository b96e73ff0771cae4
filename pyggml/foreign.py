"""Files that are often taken for models, told by their first bytes: for the error of what could not read them."""

from __future__ import annotations

import re

HEAD = 64  # so many bytes tell

_KINDS = [
    (rb"version https://git-lfs", "a pointer of Git LFS does; `git lfs pull` fetches the file itself"),
    (rb"\s*<(!doctype html|html|\?xml)", "a web page does: a site has answered instead of sending the file"),
    (rb'\s*\{\s*"', "a JSON text does, which a site may have sent instead of the file"),
    (rb"PK\x03\x04", "a ZIP archive does, or weights in PyTorch's format, which are not read"),
    (rb"\x1f\x8b", "a file that gzip has compressed does: unpack it first"),
    (rb"tjgg|fmgg|algg", "models of llama.cpp before GGUF did, which are not read: convert the original again"),
    (rb'.{3}[\0-\5]\0{4}\{\s*"', "a safetensors file does: give the folder in which it lies with its config.json"),
]


def foreign(head: bytes) -> str:
    """What a file is that begins with `head`, as the end of "it begins with b'...'"; empty for what is not known."""
    kind = next((what for begin, what in _KINDS if re.match(begin, head, re.DOTALL | re.IGNORECASE)), None)
    return "" if kind is None else f", as {kind}"
