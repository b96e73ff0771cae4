"""`pyggml info`: show the contents of a GGUF file, or of the GGUF that a Hugging Face folder would become."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pyggml.errors import ModelError
from pyggml.gguf_io.read import GGUFFile, KVValue
from pyggml.gguf_io.split import open_model
from pyggml.hf.folder import HFFolder, is_folder, open_hf_folder
from pyggml.llm.model import default_model_path, load_model

from .options import Json, ModelPath
from .outputs import print_json
from .plain import for_rich

SHOWN_ITEMS = 8  # items of an array that are shown


def items_of(value: KVValue) -> list[Any] | None:
    """The items of an array; None for a single value."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, list) else None


def short(value: KVValue) -> str:
    """A value as one cell: long arrays by their first items and length."""
    items = items_of(value)
    if items is not None and len(items) > SHOWN_ITEMS:
        return f"{items[:SHOWN_ITEMS]} ... ({len(items)} items)"
    return str(value if items is None else items)


def opened(path: str) -> GGUFFile | HFFolder:
    """Open a GGUF file or a folder. Raises GGUFError, ModelError."""
    return open_hf_folder(path) if is_folder(path) else open_model(path)


def _file_sizes(f: GGUFFile | HFFolder) -> list[int]:
    return f.file_sizes if isinstance(f, HFFolder) else [part.size for part in f.parts]


def summary(f: GGUFFile | HFFolder) -> dict[str, Any]:
    """Version (0 for a folder), sizes and counts, metadata and tensors as plain objects; of arrays only the length."""

    def plain(v: KVValue) -> Any:
        items = items_of(v)
        if items is None:
            return v
        return items if len(items) <= SHOWN_ITEMS else {"items": len(items)}

    return {
        "version": f.version if isinstance(f, GGUFFile) else 0,
        "layout": f.layout if isinstance(f, GGUFFile) else "",
        "size": sum(_file_sizes(f)),
        "n_params": sum(math.prod(t.ne) for t in f.tensors.values()),
        "types": dict(Counter(t.dtype.name for t in f.tensors.values())),
        "metadata": {k: plain(v) for k, v in f.kv.items()},
        "tensors": [{"name": t.name, "type": t.dtype.name, "ne": list(t.ne)} for t in f.tensors.values()],
    }


def verdict(path: str) -> dict[str, Any]:
    """Whether the architecture can run the file, and the tensors that no graph reads."""
    try:
        return {"problem": None, "unused": load_model(path, repack=False).unused}
    except ModelError as e:
        return {"problem": str(e), "unused": []}


def info(model: ModelPath = None, as_json: Json = False) -> None:
    """Show the metadata and tensors of a GGUF file, or those that the GGUF of a Hugging Face folder would have."""
    f = opened(str(default_model_path()) if model is None else model)
    about = {**summary(f), **verdict(f.path)}
    if as_json:
        print_json(about)
        return
    console = Console()
    types = ", ".join(f"{n} {name}" for name, n in about["types"].items())
    layout = f", weights repacked ({f.layout})" if isinstance(f, GGUFFile) and f.layout else ""
    kind = f"GGUF v{f.version}{layout}" if isinstance(f, GGUFFile) else f"Hugging Face folder of {f.family.types[0]}"
    n_files = len(_file_sizes(f))
    size = f"{about['size'] / 2**20:.1f} MiB" + (f" in {n_files} files" if n_files > 1 else "")
    console.print(f"{kind}, {size}, {about['n_params']:,} parameters, tensors: {types}")
    table = Table("key", "value", title="metadata")
    for key, value in f.kv.items():
        table.add_row(for_rich(key), for_rich(short(value)))
    console.print(table)
    table = Table("tensor", "type", "ne", "bytes", title="tensors")
    for t in f.tensors.values():
        table.add_row(for_rich(t.name), t.dtype.name, for_rich(str(list(t.ne))), f"{t.nbytes:,}")
    console.print(table)
    if about["problem"] is not None:
        console.print(for_rich(f"It cannot run: {about['problem']}"))
    elif about["unused"]:
        console.print(for_rich(f"Nothing asks for the tensors {', '.join(about['unused'])}"))
