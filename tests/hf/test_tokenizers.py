"""Ids of texts by folders' tokenizers, against the tokenizers library, and through converted files."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.hf.config import Config
from pyggml.hf.export_tokenizer import tokenizer_files
from pyggml.hf.parts import Part
from pyggml.hf.pretokenizers import expressions_of, name_of
from pyggml.hf.sentencepiece import parse
from pyggml.hf.tokenizer import read_tokenizer
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.vocab import Vocab
from pyggml.llm.vocab.forms import FORMS, normalize

from ..conftest import shared_dir
from ..linear import assert_linear

FOLDERS = shared_dir() / "golden" / "hf"
KINDS: dict[str, Any] = json.loads((FOLDERS / "tokens.json").read_text()) if FOLDERS.is_dir() else {}


def _vocab(folder: Path) -> Vocab:
    return Vocab.from_gguf(read_tokenizer(folder, Config.of_folder(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_ids(kind: str) -> None:
    for folder in KINDS[kind]["folders"]:
        vocab = _vocab(FOLDERS / folder)
        for text, ids in KINDS[kind]["cases"]:
            assert vocab.tokenize(text, add_special=False, parse_special=True) == ids, (folder, text)


@pytest.mark.parametrize("folder", ["llama", "qwen2", "llama31", "gpt2"])
def test_ids_through_a_file(folder: str, tmp_path: Path) -> None:
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    write_quantized(plan_quantization(FOLDERS / folder, None, vocab_only=True), tmp_path / "v.gguf")
    model = load_model(tmp_path / "v.gguf", vocab_only=True)
    kind = next(k for k in KINDS.values() if folder in k["folders"])
    for text, ids in kind["cases"]:
        assert model.tokenize(text, add_special=False, parse_special=True) == ids
    assert "<|im_start|>" in str(model.kv["tokenizer.chat_template"])


def test_unigram_that_cuts_at_spaces(tmp_path: Path) -> None:
    """T5's: spaces are where texts are cut, however many."""
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    tokenizer = json.loads((FOLDERS / "xlm-roberta" / "tokenizer.json").read_text())
    cuts = [{"type": "WhitespaceSplit"}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text((FOLDERS / "t5" / "config.json").read_text())
    vocab = _vocab(tmp_path)
    assert vocab.tokenize("  two  spaces ") == vocab.tokenize("two spaces")
    assert vocab.tokenize("   ", add_special=False) == []


def _piece(text: str, score: float, kind: int) -> bytes:

    body = (
        b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
    )
    return b"\x0a" + bytes([len(body)]) + body


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    pieces += [("▁a", -1.0, 1), ("b", -2.0, 1), ("▁", -3.0, 1), ("a", -4.0, 1)]
    data = b"".join(_piece(*p) for p in pieces) + b"\x12\x02\x18\x02" + b"\x1a\x04\x18\x01\x20\x00"
    model = parse(data, "m")
    assert (model.model_type, model.add_dummy_prefix, model.remove_extra_whitespaces) == (2, True, False)
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 270, "bos_token_id": 1}))
    keys = read_tokenizer(tmp_path, Config.of_folder(tmp_path))
    assert keys["tokenizer.ggml.tokens"][259:264] == ["▁a", "b", "▁", "a", "[PAD263]"]
    vocab = Vocab.from_gguf(keys)
    assert vocab.tokenize("ab", add_special=False) == [259, 260]
    assert vocab.bos == 1
    with pytest.raises(ModelError, match="SentencePiece"):
        parse(data[:-1] + b"\xff", "m")


def test_spellings_of_a_pre_tokenizer() -> None:
    def name(pattern: str, ignore_merges: bool = False) -> str | None:
        steps = [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]
        pre = {"type": "Sequence", "pretokenizers": steps}
        return name_of(Part({"pre_tokenizer": pre, "model": {"ignore_merges": ignore_merges}}, ""))

    tail = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    qwen = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{tail}"
    assert name(qwen) == "qwen2"
    assert name(qwen.replace(r"\r\n", "\r\n").replace(r"]?\p{L}+", r"]?+\p{L}++")) == "qwen2"
    llama = qwen.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    assert (name(llama), name(llama, ignore_merges=True)) == ("smaug-bpe", "llama-bpe")
    assert name("a|b") is None


def _damaged(folder: Path, name: str, path: str, change: Any) -> str:
    """What is said of the folder `name` when the value at `path` of one of its files is another."""
    shutil.copytree(FOLDERS / name, folder / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    file, *keys = path.split("/")
    values = json.loads((folder / "m" / file).read_text()) if (folder / "m" / file).is_file() else {}
    inside = values
    for key in keys[:-1]:
        inside = inside[int(key) if isinstance(inside, list) else key]
    inside[int(keys[-1]) if isinstance(inside, list) else keys[-1]] = change
    (folder / "m" / file).write_text(json.dumps(values))
    with pytest.raises(ModelError) as e:
        _vocab(folder / "m")
    assert str(folder / "m") in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    ("name", "path", "change", "message"),
    [
        ("gpt2", "tokenizer.json/model/vocab/!", 10**12, r"the token '!' has the id 1000000000000: 0 to 2097151"),
        ("gpt2", "tokenizer.json/model/vocab/!", -1, "the token '!' has the id -1: 0 to"),
        ("gpt2", "tokenizer.json/model/vocab/!", 300, "model.vocab: '!' and .* have the same id 300"),
        ("gpt2", "tokenizer.json/model/vocab/!", None, "model.vocab.! must be a whole number, not None"),
        ("gpt2", "tokenizer.json/model/vocab/\ud800", 3000, "has a token that is no text of whole characters"),
        ("gpt2", "tokenizer.json/added_tokens/0/id", 5 * 10**8, "has the id 500000000: 0 to"),
        ("gpt2", "tokenizer.json/added_tokens/0/id", -1, "has the id -1: 0 to"),
        ("gpt2", "tokenizer.json/added_tokens/0/id", "7", r"added_tokens\[0\].id must be a whole number, not '7'"),
        ("gpt2", "tokenizer.json/added_tokens/0/content", None, r"added_tokens\[0\].content must be a string"),
        ("llama", "tokenizer.json/added_tokens/1/id", 0, "have the same id 0"),
        ("gpt2", "tokenizer.json/model/merges/0", ["a"], r"model.merges\[0\] must be two texts, not \['a'\]"),
        ("gpt2", "tokenizer.json/model/merges/0", ["a b", "c"], "'a b' and 'c' cannot be merged"),
        ("gpt2", "tokenizer.json/model/vocab", [], r"model.vocab must be an object, not \[\]"),
        ("gpt2", "tokenizer.json/model", 3, "model must be an object, not 3"),
        ("gpt2", "tokenizer.json/model/type", "Trie", "a tokenizer of the kind Trie is not supported"),
        ("gpt2", "tokenizer.json/pre_tokenizer", "x", "pre_tokenizer must be an object, not 'x'"),
        ("xlm-roberta", "tokenizer.json/model/vocab/5", ["a"], r"model.vocab\[5\] must be a text and a number"),
        (
            "xlm-roberta",
            "tokenizer.json/model/vocab/5",
            ["a", 10**400],
            r"model.vocab\[5\] must be a text and a number",
        ),
        ("xlm-roberta", "tokenizer.json/post_processor/special_tokens", {}, r"special_tokens.<s>.ids must be an array"),
        ("gpt2", "tokenizer_config.json/bos_token", 7, "tokenizer_config.json: bos_token must be a string, not 7"),
        (
            "gpt2",
            "tokenizer_config.json/chat_template",
            [{"name": "a"}],
            r"chat_template\[0\].template must be a string",
        ),
        ("gpt2", "config.json/vocab_size", 2**24, "vocab_size = 16777216: up to 2097152"),
    ],
)
def test_a_damaged_value_is_named(tmp_path: Path, name: str, path: str, change: Any, message: str) -> None:
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    assert re.search(message, _damaged(tmp_path, name, path, change))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_nesting(tmp_path: Path, file: str) -> None:
    """JSON nested too deeply is refused; sequences of sequences are read however deep they are."""
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    shutil.copytree(FOLDERS / "gpt2", tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / file).write_text('{"a":' * 10**6)
    with pytest.raises(ModelError, match=rf"{file}: its JSON is nested too deeply"):
        _vocab(tmp_path / "m")
    step: Any = {"type": "Split", "pattern": {"Regex": "a|b"}}
    for _ in range(3000):
        step = {"type": "Sequence", "pretokenizers": [step]}
    assert expressions_of(Part({"pre_tokenizer": step}, "")) == ["a|b"]


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(_sentencepiece(tmp_path), tmp_path / "tokenizer.model")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}: is no regular file"):
        _vocab(tmp_path)


def test_a_template_is_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(_sentencepiece(tmp_path), tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: is no UTF-8"):
        _vocab(tmp_path)


def _sentencepiece(folder: Path) -> Path:
    (folder / "some.model").write_bytes(_piece("<unk>", 0.0, 2) + _piece("a", -1.0, 1) + b"\x12\x02\x18\x02")
    return folder / "some.model"


def test_a_sentencepiece_model_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of endless bytes were shifted as a whole for each of them."""

    def read(n: int) -> None:
        for data in (b"\xff" * n, b"\x08" + b"\x80" * n, b"\x0a\x00" * (n // 2)):
            with suppress(ModelError):
                parse(data, "m")

    assert_linear(read, 20_000)
    monkeypatch.setattr(limits, "TOKENIZER_TOKENS", 10)
    with pytest.raises(ModelError, match="m: has more than 10 pieces"):
        parse(_piece("a", 0.0, 1) * 11, "m")


def test_a_piece_of_no_type() -> None:
    """A number that int32 does not hold was an OverflowError (found by fuzzing)."""
    large = b"\x0a\x01a\x18\x80\x80\x80\x80\x08"
    for kind, data in (
        (0, _piece("a", 0.0, 0)),
        (7, _piece("a", 0.0, 7)),
        (1 << 31, b"\x0a" + bytes([len(large)]) + large),
    ):
        with pytest.raises(ModelError, match=f"m: a piece has the type {kind}; there are 1 to 6"):
            parse(data, "m")


def test_templates_with_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(_sentencepiece(tmp_path), tmp_path / "tokenizer.model")
    named = [{"name": "default", "template": "d"}, {"name": "tool", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    kv = read_tokenizer(tmp_path, Config.of_folder(tmp_path))
    assert {k: v for k, v in kv.items() if "chat" in k} == {
        "tokenizer.chat_template": "d",
        "tokenizer.chat_templates": ["tool"],
        "tokenizer.chat_template.tool": "t",
    }


def _changed(folder: str, target: Path, **changes: Any) -> Vocab:
    """The vocabulary of a golden folder whose tokenizer.json has other values: `model__dropout=0.5`."""
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    tokenizer = json.loads((FOLDERS / folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        inside = tokenizer
        for name in path:
            inside = inside[int(name) if name.isdigit() else name]
        inside[int(last) if last.isdigit() else last] = value
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(FOLDERS / folder / name, target)
    return _vocab(target)


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


_PREPEND = {"type": "Prepend", "prepend": "▁"}
_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPLIT = "pre_tokenizer__pretokenizers__0__"


@pytest.mark.parametrize(
    ("folder", "changes", "error"),
    [
        (
            "gpt2",
            {"normalizer": {"type": "Lowercase"}},
            r"normalizer.type: Lowercase: .* kind byte-level BPE",
        ),
        ("gpt2", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Strip"}]}}, "type: Strip"),
        ("gpt2", {"pre_tokenizer__add_prefix_space": True}, "add_prefix_space must be false, not True"),
        ("gpt2", {"model__dropout": 0.5}, "dropout must be 0"),
        ("gpt2", {"model__end_of_word_suffix": "</w>"}, "end_of_word_suffix must be empty"),
        ("qwen2", {_SPLIT + "behavior": "Removed"}, "behavior must be Isolated, not 'Removed'"),
        ("qwen2", {"pre_tokenizer__pretokenizers__1__type": None}, "ByteLevel is missing"),
        ("llama", {"normalizer": _sequence(_PREPEND, _PREPEND, _UNDERLINE)}, "more than one Prepend"),
        ("bert", {"normalizer": _sequence({"type": "BertNormalizer"}, {"type": "NFKD"})}, "normalizer.*type: NFKD"),
        ("xlm-roberta", {"normalizer": _sequence({"type": "NFKC"}, {"type": "NFKD"})}, "only one of NFKC, NFKD"),
        ("xlm-roberta", {"normalizer": _sequence({"type": "NFKC"}, {"type": "Precompiled"})}, "both NFKC and Precomp"),
        ("xlm-roberta", {"normalizer": _PREPEND}, "Prepend beside a pre-tokenizer for spaces"),
        ("xlm-roberta", {"normalizer": {"type": "Strip"}}, "Strip without a Replace"),
        ("llama", {"normalizer": None}, "nothing turns spaces into"),
        ("llama", {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "pre_tokenizer.type: Digits"),
        ("llama", {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, r"replacement must be U\+2581"),
        ("xlm-roberta", {"normalizer": {"type": "StripAccents"}}, "normalizer.type: StripAccents"),
        ("xlm-roberta", {"pre_tokenizer": None}, "nothing turns spaces into"),
        ("xlm-roberta", {"pre_tokenizer": {"type": "WhitespaceSplit"}}, "nothing turns spaces into"),
        ("xlm-roberta", {"model__unk_id": None}, "unk_id must be the id of the unknown token"),
        ("xlm-roberta", {"post_processor__single": []}, "post_processor.single must have one Sequence"),
        ("bert", {"post_processor": {"type": "BertProcessing", "cls": ["a"]}}, "cls must be a text and a token id"),
        ("bert", {"normalizer": None}, "BertNormalizer is missing"),
        ("bert", {"normalizer__handle_chinese_chars": False}, "handle_chinese_chars must be true"),
        ("bert", {"pre_tokenizer": {"type": "WhitespaceSplit"}}, "pre_tokenizer.type: WhitespaceSplit"),
        ("bert", {"pre_tokenizer": None}, "BertPreTokenizer is missing"),
        ("bert", {"model__continuing_subword_prefix": ""}, "continuing_subword_prefix must be ##"),
    ],
)
def test_steps_that_would_be_lost(folder: str, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=error):
        _changed(folder, tmp_path, **changes)


@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("gpt2", {"normalizer": {"type": "NFC"}}),
        ("gpt2", {"normalizer": {"type": "NFKD"}}),
        ("gpt2", {"model__byte_fallback": True}),
        ("qwen2", {_SPLIT + "behavior": "Removed", _SPLIT + "invert": True}),
        ("llama", {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                     "invert": False}}),
        ("bert", {"normalizer__lowercase": False}),
        ("bert", {"normalizer__strip_accents": False}),
    ],
)  # fmt: skip
def test_steps_of_the_library(folder: str, changes: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    vocab = _changed(folder, tmp_path, **changes)
    tokenizer = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Hello caf\u00e9", "cafe\u0301 \ufb01 A\u030a", "a<|endoftext|>e\u0301", "UPPER \u00c9t\u00e9"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert vocab.tokenize(text, add_special=False, parse_special=True) == ids, text


def _token(text: str, i: int, **said: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": i, "content": text, **flags, **said}


def test_tokens_that_swallow_white_space(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    added = [_token("<l>", 512, lstrip=True), _token("<r>", 513, rstrip=True), _token("<x>", 514)]
    vocab = _changed("gpt2", tmp_path, added_tokens=[_token("<|endoftext|>", 0, special=True), *added])
    assert (vocab.lstrip, vocab.rstrip) == ({512}, {513})
    tokenizer = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a <l> b", "a <r>  b", "a <x> b", "a \n<l><r> <x>", "\u3000\xa0<l>\u2028", "<r>\x85 \u2003a"):
        assert vocab.tokenize(text, add_special=False) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_merge_that_is_listed_twice(tmp_path: Path) -> None:
    """The last one counts."""
    if not FOLDERS.is_dir():
        pytest.skip(f"no golden data in {FOLDERS}")
    merges = json.loads((FOLDERS / "gpt2" / "tokenizer.json").read_text())["model"]["merges"]
    _changed("gpt2", tmp_path, model__merges=[*merges, merges[0]])
    twice = read_tokenizer(tmp_path, Config.of_folder(tmp_path))["tokenizer.ggml.merges"]
    _changed("gpt2", tmp_path, model__merges=[*merges[1:], merges[0]])
    assert twice == read_tokenizer(tmp_path, Config.of_folder(tmp_path))["tokenizer.ggml.merges"]


def test_the_unknown_token_is_the_model_s(tmp_path: Path) -> None:
    """Not that of tokenizer_config.json, which the library's model does not know; and not a token without a text."""
    assert _changed("bert", tmp_path, model__unk_token="a").unk == _changed("bert", tmp_path).tokenize("a", False)[0]
    vocab = json.loads((FOLDERS / "xlm-roberta" / "tokenizer.json").read_text())["model"]["vocab"]
    assert _changed("xlm-roberta", tmp_path, model__vocab=[*vocab, ["", -1.0]]).unk == 3


def test_frames(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cls, sep = ["[MASK]", 4], ["[PAD]", 0]
    for kind in ("BertProcessing", "RobertaProcessing"):
        vocab = _changed("bert", tmp_path, post_processor={"type": kind, "cls": cls, "sep": sep})
        assert (vocab.before, vocab.after) == ([4], [0])
    assert not caplog.records
    special = {"m": {"id": "m", "ids": [0, 1], "tokens": ["a", "b"]}}
    single = [{"SpecialToken": {"id": "m", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    frame = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    _changed("gpt2", tmp_path, post_processor=frame)
    assert "post_processor puts [0, 1] before a text, pyggml does not" in caplog.text


def test_a_form_in_a_file(tmp_path: Path) -> None:
    vocab = _changed("gpt2", tmp_path, normalizer={"type": "NFC"})
    assert vocab.form == "NFC"
    kv = read_tokenizer(tmp_path, Config.of_folder(tmp_path))
    written = tokenizer_files(kv, tmp_path)["tokenizer.json"]
    assert written["normalizer"] == {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    with pytest.raises(ModelError, match=r"normalizer.form must be one of NFC, NFD, NFKC, NFKD, not 'nope'"):
        Vocab.from_gguf({**kv, "tokenizer.ggml.normalizer.form": "nope"})


def test_forms_of_long_runs_of_marks() -> None:
    """Marks that are out of order, which Python's normalize takes the square of their number for."""
    run = "\u0301\u0316" * 50 + "\u0344\u0f73" * 20
    for form in FORMS:
        for text in ("e" + run + "x", run, "\u1ec7" + run + "\u1ec7" + run):
            assert normalize(form, text) == unicodedata.normalize(form, text)
    assert_linear(lambda n: normalize("NFC", "e" + "\u0301\u0316" * n), 2_000)
