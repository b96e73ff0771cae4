"""Checkpoints made for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

F8 = np.dtype("i1")  # stands for F8_E4M3: NumPy has no such type, and checkpoints no signed bytes
_NAMES = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "|i1": "F8_E4M3", "|u1": "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file; uint16 is BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, a in tensors.items():
        end = len(data) + a.nbytes
        header[name] = {"dtype": _NAMES[a.dtype.str], "shape": list(a.shape), "data_offsets": [len(data), end]}
        data += a.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """A folder without a tokenizer."""
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)


def bfloat16_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, all of which are bfloat16, as float32; read without the package's reader."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors: dict[str, np.ndarray] = {}
    for name, t in json.loads(data[8:start]).items():
        if name != "__metadata__":
            assert t["dtype"] == "BF16", name
            first, end = t["data_offsets"]
            bits = np.frombuffer(data[start + first : start + end], np.uint16).astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(t["shape"])
    return tensors
