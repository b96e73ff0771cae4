"""Tokenizers of folders: every vocabulary of the shared data as `tokenizers`, `sentencepiece`, transformers and pyggml
read what is written of it, and files with values changed: each is read, or raises the error that says what is wrong.
"""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml
from pyggml.errors import ModelError
from pyggml.gguf_io.split import open_model
from pyggml.hf.config import Config
from pyggml.hf.export_tokenizer import tokenizer_files
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.llm.vocab import TokenType, Vocab

from ..conftest import shared_dir
from .workers import attack

SHARED = shared_dir()
FOLDERS = SHARED / "golden" / "hf"
MODELS = {p.stem.removeprefix("ggml-vocab-"): p for p in sorted((SHARED / "golden" / "vocab").glob("*.gguf"))}
MODELS |= {p.stem: p for p in sorted((SHARED / "models").glob("*.gguf"))}
MODELS["tales"] = Path(pyggml.__file__).parent / "data" / "tales-Q8_0.gguf"


def write(kv: dict[str, Any], folder: Path, model_type: str) -> None:
    n_vocab = len(kv["tokenizer.ggml.tokens"])
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": n_vocab}))
    for file, content in tokenizer_files(kv, folder).items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_libraries(name: str, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    from sentencepiece import SentencePieceProcessor

    golden: dict[str, Any] = json.loads(gzip.decompress((SHARED / "golden/vocab/ids.json.gz").read_bytes()))
    kv = dict(open_model(MODELS[name]).kv)
    vocab = Vocab.from_gguf(kv)
    cases: list[Any] = golden["tokenize"].get(name) or [
        (t, add, parse, vocab.tokenize(t, add, parse)) for t, add, parse, _ in golden["tokenize"]["llama-spm"]
    ]
    shown: list[list[int]] = [ids for ids, _ in golden["detokenize"].get(name, [])] + [c[3] for c in cases]
    write(kv, tmp_path, "gemma4" if vocab.kind == "gemma4" else "llama")
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    back = Vocab.from_gguf(read_tokenizer(tmp_path, Config.of_folder(tmp_path)))

    def by_tokenizers(text: str, add: bool, parse: bool) -> list[int]:
        hf.encode_special_tokens = not parse
        return hf.encode(text, add_special_tokens=add).ids

    def by_transformers(text: str, add: bool, parse: bool) -> list[int]:
        return auto(text, add_special_tokens=add, split_special_tokens=not parse)["input_ids"]

    made: dict[str, tuple[Callable[..., list[int]], Callable[..., str]]] = {
        "tokenizers": (by_tokenizers, lambda ids: hf.decode(ids, skip_special_tokens=False)),
        "transformers": (by_transformers, lambda ids: auto.decode(ids, skip_special_tokens=False)),
        "pyggml": (back.tokenize, lambda ids: back.detokenize(ids, unparse_special=True)),
    }
    counts: dict[str, tuple[int, int, int, int]] = {}
    for library, (encode, decode) in made.items():
        same = sum(encode(t, add, parse) == ids for t, add, parse, ids in cases)
        texts = sum(decode(ids) == vocab.detokenize(ids, unparse_special=True) for ids in shown)
        counts[library] = (same, len(cases), texts, len(shown))
    if (tmp_path / "tokenizer.model").exists():
        sp = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
        hidden = {TokenType.UNKNOWN, TokenType.CONTROL}  # which it shows otherwise
        shown = [ids for ids in shown if hidden.isdisjoint(map(vocab.type_of, ids))]
        plain = [(text, ids) for text, add, parse, ids in cases if not add and not parse]
        same = sum(sp.encode(text) == ids for text, ids in plain)
        texts = sum(sp.decode(ids) == vocab.detokenize(ids) for ids in shown)
        counts["sentencepiece"] = (same, len(plain), texts, len(shown))
    print(f"\n{name} (ids, of, texts, of): {counts}")
    assert all(same == n and texts == m for same, n, texts, m in counts.values())


ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**12, 5 * 10**8, 10**400, 1.5, 1e999, float("nan"), -1e300),
    *("", "a", " ", "\0", "\ud800", "\udcff", "x" * 10**5, "(a+)+$", [], [[]], [None], {}, {"type": "Sequence"}),
    *([1, 2], [["a", 1]], ["a b", "b"], {"a": None}, {"id": 1}, {"String": 1}),
]
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json")


DEEP = "@deep@"


def change(rng: np.random.Generator, value: Any) -> None:
    """Change one value somewhere inside."""
    while value:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[int(rng.integers(len(keys)))]
        inside = value[key]
        if isinstance(inside, dict | list) and inside and rng.random() < 0.8:
            value = inside
            continue
        what = rng.random()
        if what < 0.2:
            del value[key]
        elif what < 0.3 and isinstance(value, dict):
            value[str(rng.choice(["x", "type", "id", "content", "vocab"]))] = value.pop(key)
        elif what < 0.4 and isinstance(value, list):
            value.append(copy.deepcopy(inside))
        elif what < 0.45:
            value[key] = DEEP
        else:
            value[key] = copy.deepcopy(ODD[int(rng.integers(len(ODD)))])
        return


def change_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, what = int(rng.integers(len(out) + 1)), rng.random()
        if what < 0.4 and at < len(out):
            out[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, 0x0A]))
        elif what < 0.6:
            del out[at : at + int(rng.choice([1, 7, 1000]))]
        elif what < 0.8:
            out[at:at] = bytes([int(rng.choice([0xFF, 0, 0x0A, 0x80]))]) * int(rng.choice([1, 9, 300_000]))
        else:
            del out[at:]
    return bytes(out)


def read_damaged(rng: np.random.Generator, folder: Path, source: Path) -> str:
    target = folder / "damaged"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".model", ".jinja"):
            shutil.copy(path, target)
    model = target / "tokenizer.model"
    if model.exists() and rng.random() < 0.7:
        model.write_bytes(change_bytes(rng, model.read_bytes()))
    else:
        found = [target / name for name in FILES if (target / name).exists()]
        path = found[int(rng.integers(len(found)))]
        value = json.loads(path.read_text())
        for _ in range(int(rng.integers(1, 4))):
            change(rng, value)
        n = int(rng.choice([1, 100, 900, 10**5]))
        begin, end = rng.choice([("[", "]"), ('{"type":"Sequence","normalizers":[', "]}")])
        path.write_text(json.dumps(value).replace(f'"{DEEP}"', begin * n + end * n))
        if rng.random() < 0.1:
            path.write_bytes(change_bytes(rng, path.read_bytes()))
    try:
        vocab = Vocab.from_gguf(read_tokenizer(target, Config.of_folder(target)))
        vocab.detokenize(vocab.tokenize("Hello world, this is\n 123 <s> é", parse_special=True))
    except ModelError as e:
        assert "object has no attribute" not in str(e) and "Error(" not in str(e), str(e)
        return "ModelError"
    return "read"


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama31", "bert", "xlm-roberta"])
def test_damaged(name: str, tmp_path: Path) -> None:
    attack(read_damaged, tmp_path, FOLDERS / name)


@pytest.mark.parametrize("name", ["llama", "xlm-roberta"])
def test_damaged_sentencepiece(name: str, tmp_path: Path) -> None:
    kv = read_tokenizer(FOLDERS / name, Config.of_folder(FOLDERS / name))
    kv.pop("tokenizer.ggml.space_prefix_once", None)  # which has no such file
    (tmp_path / "sound").mkdir()
    write(kv, tmp_path / "sound", "llama")
    attack(read_damaged, tmp_path, tmp_path / "sound")
