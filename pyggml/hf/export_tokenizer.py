"""A GGUF's vocabulary as the files of a folder: tokenizer.json for byte-level BPE and WordPiece, tokenizer.model for
SentencePiece's, and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.errors import ModelError

from .pretokenizers import steps_of
from .sentencepiece import BPE, UNIGRAM, SentencePiece, build
from .tokenizer import CONTROL, KEY, ROLES, SPACE, UNUSED, USER_DEFINED

Keys = dict[str, Any]


def tokenizer_files(kv: Mapping[str, Any], folder: Path) -> dict[str, Keys]:
    """The JSON files; tokenizer.model is written at once. Raises ModelError for a vocabulary that has no such form."""
    model = kv.get(f"{KEY}model", "none")
    if model in ("none", "no_vocab"):
        return {}
    about = _about(kv)
    if model in ("llama", "t5"):
        (folder / "tokenizer.model").write_bytes(build(_sentencepiece(kv, model)))
        return {"tokenizer_config.json": {**about, "added_tokens_decoder": _added_by_id(kv)}}
    if model == "gpt2":
        return {"tokenizer_config.json": about, "tokenizer.json": _byte_level(kv)}
    if model == "bert":
        return {"tokenizer_config.json": about, "tokenizer.json": _word_piece(kv)}
    raise ModelError(f"a vocabulary of the kind {model!r} has no form in a folder that is written")


def _tokens(kv: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens: list[str] = kv[f"{KEY}tokens"]
    return tokens, np.asarray(kv.get(f"{KEY}token_type", np.ones(len(tokens))), np.int64).tolist()


def _added(kv: Mapping[str, Any]) -> list[Keys]:
    tokens, types = _tokens(kv)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": text, **flags, "special": kind == CONTROL}
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _added_by_id(kv: Mapping[str, Any]) -> Keys:
    return {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in _added(kv)}


def _about(kv: Mapping[str, Any]) -> Keys:
    tokens, _ = _tokens(kv)
    about: Keys = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in ROLES.items():
        i = kv.get(f"{KEY}{name}_token_id")
        if isinstance(i, int) and i < len(tokens):
            about[f"{role}_token"] = tokens[i]
    for flag in ("add_bos_token", "add_eos_token"):
        if f"{KEY}{flag}" in kv:
            about[flag] = kv[f"{KEY}{flag}"]
    if "tokenizer.chat_template" in kv:
        about["chat_template"] = kv["tokenizer.chat_template"]
    return about


def _sentencepiece(kv: Mapping[str, Any], model: str) -> SentencePiece:
    tokens, types = _tokens(kv)
    scores = np.asarray(kv[f"{KEY}scores"], np.float64).tolist()
    charsmap = kv.get(f"{KEY}precompiled_charsmap")
    return SentencePiece(
        list(zip(tokens, scores, types, strict=True)),
        UNIGRAM if model == "t5" else BPE,
        b"" if charsmap is None else np.asarray(charsmap).tobytes(),
        bool(kv.get(f"{KEY}add_space_prefix", True)),
        bool(kv.get(f"{KEY}remove_extra_whitespaces", False)),
    )


def _byte_level(kv: Mapping[str, Any]) -> Keys:
    tokens, types = _tokens(kv)
    pre, ignore_merges = steps_of(str(kv.get(f"{KEY}pre", "default")))
    vocab = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    merges = [merge.split(" ", 1) for merge in kv[f"{KEY}merges"]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": _added(kv),
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges},
    }


def _word_piece(kv: Mapping[str, Any]) -> Keys:
    tokens, types = _tokens(kv)
    vocab: dict[str, int] = {}
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != UNUSED:
            plain = kind in (CONTROL, USER_DEFINED)
            vocab[text if plain else text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"] = i
    unknown = kv.get(f"{KEY}unknown_token_id", 0)
    return {
        "version": "1.0",
        "added_tokens": _added(kv),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": tokens[unknown], "continuing_subword_prefix": "##", "vocab": vocab},
    }
