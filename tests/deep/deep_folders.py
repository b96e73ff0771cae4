"""Damaged folders, adapters, traces and saved states: each loads, or raises the error that says what is wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.hf.folder import open_hf_folder
from pyggml.inspect.trace import diff, load_trace, save_trace, trace
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..conftest import shared_dir
from ..llm.adapters.make import write_peft
from ..llm.adapters.test_peft import ones
from .workers import attack

HF = shared_dir() / "golden" / "hf"
FOLDERS = sorted(p.name for p in HF.iterdir() if p.is_dir()) if HF.is_dir() else []
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**20, 2**24, 2**31, 2**53, 2**64, 10**400, 1e999, -1e999, 1e-320),
    *(0.5, -0.5, 1e30, float("nan"), "", "x", "llama", "silu", "\0", "a" * 4000, [], {}, [1], ["x"], [[]], {"a": 1}),
    *([1.5] * 40, [None, None], list(range(3000)), {"full_attention": 3}, {"rope_type": "yarn", "factor": "x"}),
]
_TEXTS = [
    b"",
    b"[" * 10**5,
    b'{"a":' * 10**5,
    b"3",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"1" * 10**5,
    b'{"a": 1e99999}',
]
Refused = (gg.GGMLError,)


def _pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def damage(rng: np.random.Generator, value: Any) -> Any:
    """JSON with one to three values exchanged, added, moved or gone."""
    root = {"": copy.deepcopy(value)}
    for _ in range(int(rng.integers(1, 4))):
        places: list[tuple[Any, Any]] = []
        todo: list[Any] = [root]
        while todo:
            x = todo.pop()
            inside = list(x.items()) if isinstance(x, dict) else list(enumerate(x))[:40]
            places += [(x, key) for key, _ in inside]
            todo += [v for _, v in inside if isinstance(v, dict | list)]
        x, key = _pick(rng, places[1:] or places)
        what = int(rng.integers(6))
        if what == 0 and x is not root:
            del x[key]
        elif what == 1:
            y, other = _pick(rng, places)
            if isinstance(y, dict) and other in y:
                x[key] = copy.deepcopy(y[other])
        elif what == 2 and type(x[key]) in (int, float):
            x[key] = x[key] * _pick(rng, [2, 3, -1, 1000, 0.5]) + _pick(rng, [0, 1, -1])
        elif what == 3 and isinstance(x, dict) and x is not root:
            x[_pick(rng, ["", "x", str(key) + "x", "head_dim", "n_head", "rope_scaling", "sliding_window"])] = (
                copy.deepcopy(x[key])
            )
        else:
            x[key] = copy.deepcopy(_pick(rng, _VALUES))
    return root[""]


def damage_header(rng: np.random.Generator, data: bytes) -> bytes:
    """A safetensors file with another header, length, or end."""
    n = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + n]), data[8 + n :]
    what = int(rng.integers(8))
    if what == 0:
        return data[: int(rng.integers(len(data)))]
    if what == 1:
        return _pick(rng, [0, 1, n - 1, n + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    if what == 2:
        text = _pick(rng, _TEXTS)
    else:
        entries = {k: v for k, v in header.items() if rng.integers(30)}
        name = _pick(rng, list(header))
        if what == 3 and name in entries:
            entries[_pick(rng, ["", "x", name + ".x", name.replace("0", "9"), name.replace("0", "99999999")])] = (
                entries.pop(name)
            )
        else:
            entries[name] = damage(rng, header[name])
        text = json.dumps(entries).encode()
        if what == 4:
            text = text.replace(b"[", b"[" + _pick(rng, [b"1e999,", b"1" + b"0" * 4000 + b",", b"-", b"1," * 70]), 3)
    return len(text).to_bytes(8, "little") + text + rest


def damaged_folder(rng: np.random.Generator, folder: Path, source: Path) -> Path:
    made = folder / "damaged"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(source, made, copy_function=shutil.copy)
    for path in made.iterdir():
        path.chmod(0o644)
    files = sorted(made.iterdir())
    path = files[0] if rng.integers(2) else _pick(rng, files)  # the first is a config
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        path.write_bytes(damage_header(rng, data))
    elif rng.integers(12) == 0 or path.suffix != ".json":
        path.write_bytes(_pick(rng, [*_TEXTS, data[: int(rng.integers(len(data) + 1))]]))
    else:
        path.write_text(json.dumps(damage(rng, json.loads(data))))
    return made


def load_folder(rng: np.random.Generator, folder: Path, source: Path) -> str:
    made = damaged_folder(rng, folder, source)
    try:
        if rng.integers(3) == 0:
            write_quantized(plan_quantization(made, _pick(rng, [None, "Q8_0"])), folder / "m.gguf", 1)
            gg.load_model(folder / "m.gguf").new_context(n_ctx=32, n_threads=1)
            return "converted"
        open_hf_folder(made)
        model = gg.load_model(made, repack=False)
    except Refused as e:
        inside = ("object has no", "has no attribute", "Error: ", "NoneType", "unsupported operand", "argument must")
        return "refused, with Python's words" if any(text in str(e) for text in inside) else type(e).__name__
    try:
        ctx = model.new_context(n_ctx=32, n_threads=1)
        if model.decoder_start is not None:
            ctx.encode([1, 2, 5])
        ctx.decode([7])
    except Refused as e:
        return f"refused later: {type(e).__name__}"
    return "decoded"


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    attack(load_folder, tmp_path, HF / name)


def load_adapter(rng: np.random.Generator, folder: Path, source: Path) -> str:
    model = gg.load_model(HF / "llama", repack=False)
    made = damaged_folder(rng, folder, source)
    config = made / "adapter_config.json"
    if rng.integers(4) == 0:
        pattern = _pick(
            rng,
            ["(([a-z_.0-9]+)+)+!", "(", "(?:.|..|.{3}|.{4}|.{5})+[!?]", "a{99999999999}", "(" * 9000, ".*" * 900 + "!"],
        )
        about = json.loads((source / "adapter_config.json").read_text())
        config.write_text(json.dumps({**about, "rank_pattern": {pattern: _pick(rng, _VALUES)}}))
    try:
        ctx = model.new_context(n_ctx=32, n_threads=1)
        ctx.set_loras([(model.load_lora(made), 1.0)])
        ctx.decode([1, 2])
    except Refused as e:
        return type(e).__name__
    return "decoded"


def test_adapters(tmp_path: Path) -> None:
    hp = gg.load_model(HF / "llama", repack=False).hparams
    made = ones("model.layers.0.mlp.up_proj", hp.layer(0).n_ff, hp.n_embd, 4)
    made |= ones("model.layers.1.mlp.down_proj", hp.n_embd, hp.layer(0).n_ff, 4)
    attack(load_adapter, tmp_path, write_peft(tmp_path / "sound", made, rank_pattern={"x.*": 3}))


def load_damaged_trace(rng: np.random.Generator, folder: Path, source: Path) -> str:
    path = folder / "t.npz"
    what = int(rng.integers(5))
    if what < 2:
        data = bytearray(source.read_bytes())
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data[: len(data) if rng.integers(4) else int(rng.integers(len(data)))])
    else:
        with zipfile.ZipFile(source) as z:
            entries = {name: z.read(name) for name in z.namelist()}
        if what == 2:
            entries["manifest.json"] = json.dumps(damage(rng, json.loads(entries["manifest.json"]))).encode()
        elif what == 3:
            entries["manifest.json"] = _pick(rng, _TEXTS)
        name = _pick(rng, list(entries))
        data = bytearray(entries[name])
        if what == 4:
            for _ in range(int(rng.integers(1, 5))):
                data[int(rng.integers(min(len(data), 128)))] = int(rng.integers(256))
            if rng.integers(3) == 0:
                data = data.replace(
                    b"(7, ", _pick(rng, [b"(9999999999999999, ", b"(-7, ", b"(True, ", b"(7.0, ", b"((), ", b"(7, 7, "])
                )
        entries[name] = bytes(data)
        with zipfile.ZipFile(path, "w", _pick(rng, [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])) as z:
            for name, data in entries.items():
                z.writestr(name, data)
    try:
        t = load_trace(path)
        diff(t, load_trace(source))
    except gg.GGMLError as e:
        return type(e).__name__
    return "loaded"


def test_traces(tmp_path: Path) -> None:
    model = gg.load_model(HF / "llama", repack=False)
    save_trace(trace(model, [1, 2, 3, 4, 5, 6, 7], "l_out-*", "result_norm"), tmp_path / "sound.npz")
    attack(load_damaged_trace, tmp_path, tmp_path / "sound.npz")


def load_damaged_state(rng: np.random.Generator, folder: Path, source: Path) -> str:
    """With lengths and checksum that fit again."""
    data = source.read_bytes()
    n = struct.unpack_from("<I", data, 12)[0]
    text, body = data[24 : 24 + n], bytearray(data[24 + n : -32])
    what = int(rng.integers(4))
    if what == 0:
        text = _pick(rng, _TEXTS)
    elif what == 1:
        for _ in range(int(rng.integers(1, 9))):
            body[int(rng.integers(len(body)))] = int(rng.integers(256))
    else:
        text = json.dumps(damage(rng, json.loads(text))).encode()
    if what == 3:
        body = body[: int(rng.integers(len(body)))]
    whole = data[:12] + struct.pack("<IQ", len(text), 24 + len(text) + len(body) + 32) + text + bytes(body)
    path = folder / "state"
    path.write_bytes(whole + hashlib.sha256(whole).digest())
    ctx = gg.load_model(HF / "llama", repack=False).new_context(n_ctx=32, n_threads=1, n_seq_max=2)
    ctx.decode([3])
    try:
        ctx.load_state(path)
    except gg.GGMLError as e:
        ctx.decode([4])
        return type(e).__name__
    try:
        ctx.decode([4])
    except gg.GGMLError as e:
        return f"refused later: {type(e).__name__}"
    return "loaded"


def test_states(tmp_path: Path) -> None:
    ctx = gg.load_model(HF / "llama", repack=False).new_context(n_ctx=32, n_seq_max=2)
    ctx.decode([1, 2, 5])
    ctx.save_state(tmp_path / "sound", [1, 2, 5])
    attack(load_damaged_state, tmp_path, tmp_path / "sound")
