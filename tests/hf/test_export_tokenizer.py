"""Tokenizers that are written, as the libraries `tokenizers` and `sentencepiece` read them: the same ids and texts.

All vocabularies, and the transformers library: `tests/deep/deep_tokenizers.py`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import ModelError
from pyggml.gguf_io.read import open_gguf
from pyggml.hf.config import Config
from pyggml.hf.export_tokenizer import tokenizer_files
from pyggml.hf.parts import Part
from pyggml.hf.pretokenizers import name_of, steps_of
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.llm.vocab import TokenType, Vocab
from pyggml.llm.vocab.kinds.pre import PRE
from pyggml.llm.vocab.kinds.split import Splitter

from ..conftest import shared_dir

SHARED = shared_dir()
FOLDERS = SHARED / "golden" / "hf"
pytestmark = pytest.mark.skipif(not FOLDERS.is_dir(), reason=f"no golden data in {FOLDERS}")
KEY = "tokenizer.ggml."
Case = tuple[str, bool, bool, list[int]]


def _golden(name: str) -> tuple[dict[str, Any], list[Case], list[list[int]]]:
    """A vocabulary, the ids of texts (with special tokens or without, parsed or not), and ids to be shown."""
    kv = dict(open_gguf(SHARED / "golden" / "vocab" / f"ggml-vocab-{name}.gguf").kv)
    data = json.loads(gzip.decompress((SHARED / "golden" / "vocab" / "ids.json.gz").read_bytes()))
    return kv, data["tokenize"][name], [ids for ids, _ in data["detokenize"][name]]


def _of_folder(name: str, **changes: Any) -> tuple[dict[str, Any], list[Case], list[list[int]]]:
    """The vocabulary of a folder with other keys, which are removed where they are None."""
    kv = read_tokenizer(FOLDERS / name, Config.of_folder(FOLDERS / name))
    kv |= {KEY + key: value for key, value in changes.items()}
    kv = {key: value for key, value in kv.items() if value is not None}
    vocab = Vocab.from_gguf(kv)
    kinds: dict[str, Any] = json.loads((FOLDERS / "tokens.json").read_text())
    texts = [text for kind in kinds.values() for text, _ in kind["cases"]] + ["™́ é x", "  two  spaces ", "\n\n\na\n"]
    cases = [(t, add, True, vocab.tokenize(t, add, True)) for t in texts for add in (False, True)]
    return kv, cases, [ids for *_, ids in cases]


def _write(kv: dict[str, Any], folder: Path, model_type: str = "llama") -> None:
    for name, content in tokenizer_files(kv, folder).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


VOCABULARIES = {
    **{name: lambda name=name: _golden(name) for name in ("phi-3", "deepseek-coder", "bert-bge")},
    "gpt2": lambda: _of_folder("gpt2"),
    "spm": lambda: _of_folder("llama"),
    "spm, no space first": lambda: _of_folder("mistral", add_space_prefix=False),
    "ugm": lambda: _of_folder("xlm-roberta", space_prefix_once=None),
    "ugm, one space": lambda: _of_folder("xlm-roberta", space_prefix_once=None, remove_extra_whitespaces=True),
    "ugm, as tokenizers has it": lambda: _of_folder("xlm-roberta"),
    "gemma4": lambda: _of_folder("gemma", model="gemma4", add_space_prefix=False, merges=_merges_of("gemma")),
}


def _merges_of(name: str) -> list[str]:
    merges = json.loads((FOLDERS / name / "tokenizer.json").read_text())["model"]["merges"]
    return [m if isinstance(m, str) else " ".join(m) for m in merges]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_libraries_read_the_same(name: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    kv, cases, shown = VOCABULARIES[name]()
    vocab = Vocab.from_gguf(kv)
    _write(kv, tmp_path, model_type="gemma4" if name == "gemma4" else "llama")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [vocab.detokenize(ids, unparse_special=True) for ids in shown]
    for text, add, parse, ids in cases:
        tokenizer.encode_special_tokens = not parse
        assert tokenizer.encode(text, add_special_tokens=add).ids == ids, text
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in shown] == texts
    back = Vocab.from_gguf(read_tokenizer(tmp_path, Config.of_folder(tmp_path)))
    assert not [text for text, add, parse, ids in cases if back.tokenize(text, add, parse) != ids]
    assert [back.detokenize(ids, unparse_special=True) for ids in shown] == texts
    if (tmp_path / "tokenizer.model").exists():
        from sentencepiece import SentencePieceProcessor

        sp = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
        assert not [text for text, add, parse, ids in cases if not add and not parse and sp.encode(text) != ids]
        hidden = (TokenType.UNKNOWN, TokenType.CONTROL)  # which it shows otherwise
        plain = [(i, t) for i, t in zip(shown, texts, strict=True) if not {*map(vocab.type_of, i)} & {*hidden}]
        assert plain and [sp.decode(ids) for ids, _ in plain] == [text for _, text in plain]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_becomes_an_unused_token_all_the_same(name: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    kv, cases, _ = _of_folder(name)
    tokens, types = kv[f"{KEY}tokens"], kv[f"{KEY}token_type"]
    types[next(i for *_, ids in cases for i in ids if types[i] == TokenType.NORMAL and len(tokens[i]) > 2)] = 5
    _write(kv, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert all(tokenizer.encode(text, add_special_tokens=add).ids == ids for text, add, _, ids in cases)


def test_every_pre_tokenizer_cuts_texts_the_same() -> None:
    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    regex = pytest.importorskip("tokenizers").Regex
    cases = json.loads(gzip.decompress((SHARED / "golden" / "vocab" / "pre.json.gz").read_bytes()))
    texts = [text for text, _ in cases["default"]] + ["12345678x1234567", "a" + "7" * 10, "<sentinel:12>"]
    for name, pre in PRE.items():
        if not pre.byte_level:
            with pytest.raises(ModelError, match="has tokens of characters"):
                steps_of(name)
            continue
        written, ignore_merges = steps_of(name)
        *patterns, byte_level = written["pretokenizers"]
        assert byte_level["trim_offsets"] is True  # which the library wants
        steps = [pre_tokenizers.Split(regex(p["pattern"]["Regex"]), "isolated") for p in patterns]
        cut, splitter = pre_tokenizers.Sequence(steps), Splitter(pre.rules)
        for text in texts:
            assert [word for word, _ in cut.pre_tokenize_str(text)] == splitter.words(text), (name, text)
        cleaned = {"type": "Replace"} if pre.clean_spaces else {}
        about = {"pre_tokenizer": written, "model": {"ignore_merges": ignore_merges}, "decoder": cleaned}
        back = PRE[name_of(Part(about, "")) or ""]
        assert (back.rules, back.ignore_merges, back.clean_spaces) == (pre.rules, ignore_merges, pre.clean_spaces)


def test_what_has_no_form_is_refused_by_name(tmp_path: Path) -> None:
    spm = read_tokenizer(FOLDERS / "llama", Config.of_folder(FOLDERS / "llama"))
    bpe = read_tokenizer(FOLDERS / "gpt2", Config.of_folder(FOLDERS / "gpt2"))
    tokens: list[str] = bpe[f"{KEY}tokens"]
    last = len(tokens) - 1
    types = spm[f"{KEY}token_type"].copy()
    types[types == TokenType.BYTE] = [TokenType.NORMAL] * 56 + [TokenType.BYTE] * 200
    letter = next(i for i, text in enumerate(spm[f"{KEY}tokens"]) if text == "e")
    no_letter = [f"[{i}]" if i == letter else text for i, text in enumerate(spm[f"{KEY}tokens"])]
    cases: list[tuple[dict[str, Any], str]] = [
        ({f"{KEY}model": "rwkv", f"{KEY}tokens": ["a"], "x": 0}, "a vocabulary of the kind 'rwkv' has no form"),
        ({**bpe, f"{KEY}model": "whitespace", f"{KEY}pre": "whitespace"}, "a vocabulary of the kind 'whitespace'"),
        ({**bpe, f"{KEY}pre": "sarvam-moe"}, "the pre-tokenizer 'sarvam-moe' has tokens of characters"),
        ({**bpe, f"{KEY}tokens": [*tokens[:-1], "\udcff"]}, rf"token {last}, '\\udcff', is no UTF-8"),
        ({**bpe, f"{KEY}merges": ["a nothing"]}, "merges: 'a nothing' needs the token 'nothing'"),
        ({**spm, f"{KEY}token_type": types}, "has 200 tokens of bytes"),
        ({**spm, f"{KEY}tokens": no_letter}, "is made of 'e', which is no token"),
    ]
    for kv, text in cases:
        with pytest.raises(ModelError, match=text):
            tokenizer_files(kv, tmp_path)


def test_roles_and_templates_come_back(tmp_path: Path) -> None:
    kv = read_tokenizer(FOLDERS / "llama31", Config.of_folder(FOLDERS / "llama31"))
    kv |= {"tokenizer.chat_templates": ["tool"], "tokenizer.chat_template.tool": "{{ tools }}"}
    _write(kv, tmp_path)
    back = read_tokenizer(tmp_path, Config.of_folder(tmp_path))
    for key, value in kv.items():
        if "chat_template" in key or key.endswith(("bos_token_id", "eos_token_id")):
            assert back[key] == value, key
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["bos_token"] == "<|begin_of_text|>"


def test_a_normal_token_gets_no_role(tmp_path: Path) -> None:
    """Libraries take a token with a role for a special one, and leave it out of texts."""
    kv = read_tokenizer(FOLDERS / "gpt2", Config.of_folder(FOLDERS / "gpt2"))
    files = tokenizer_files({**kv, f"{KEY}padding_token_id": kv[f"{KEY}tokens"].index("!")}, tmp_path)
    assert "pad_token" not in files["special_tokens_map.json"]
    assert files["special_tokens_map.json"]["eos_token"] == "<|endoftext|>"
