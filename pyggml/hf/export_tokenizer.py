"""Write a GGUF's vocabulary as the files of a folder, for the libraries `tokenizers`, `transformers` and
`sentencepiece`: tokenizer.json for every kind, tokenizer.model too for SentencePiece's kinds, and the roles of tokens.

tokenizer.json describes in steps of the `tokenizers` library what the vocabulary (`llm/vocab/`) does, so that both give
the same ids. A vocabulary that these steps cannot describe is refused by name.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf_io.read import says
from pyggml.llm.vocab import TokenType, Vocab
from pyggml.llm.vocab.kinds.bpe import SPELLING
from pyggml.native.vocab.texts import Ints, Texts
from pyggml.small_file import HALF

from .pretokenizers import steps_of
from .sentencepiece import BPE, UNIGRAM, SentencePiece, build
from .tokenizer import KEY, ROLES
from .tokenizer_steps import LINES, SPACE, first_of_decomposed, replace_step, steps_of_scores

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
_ADDED = (*_SPECIAL, TokenType.USER_DEFINED)
_BY_SCORE = (TokenType.NORMAL, TokenType.UNUSED, TokenType.USER_DEFINED)  # what text may become in a Unigram model
_NEVER = -1000.0  # the score of all other tokens in a Unigram model
_MAX_WORD = 100  # characters; BERT takes a longer word for unknown
Keys = dict[str, Any]


def tokenizer_files(kv: Mapping[str, Any], folder: Path) -> dict[str, Keys]:
    """The contents of the JSON files; tokenizer.model is written into `folder` at once. Raises ModelError for a
    vocabulary that these files cannot describe."""
    if f"{KEY}model" not in kv or says(kv, f"{KEY}model", "none", "no_vocab"):
        return {}
    v = _Vocabulary(kv)
    kind = v.vocab.kind
    make = {"llama": _spm, "t5": _unigram, "gpt2": _byte_level, "gemma4": _gemma4, "bert": _word_piece}.get(kind)
    if make is None:
        raise ModelError(f"a vocabulary of the kind {kind!r} has no form that the tokenizers library reads")
    tokenizer: Keys = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": v.added(), **make(v)}
    form = v.vocab.form
    if form is not None:
        tokenizer["normalizer"] = _sequence("normalizers", [{"type": form}, *_steps(tokenizer["normalizer"])])
    elif kind == "llama" or (kind == "t5" and not _prefix_once(kv)):  # SentencePiece has no form and no such prefix
        (folder / "tokenizer.model").write_bytes(build(_sentencepiece(v)))
    roles = v.roles()
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **roles, **v.about()},
        "special_tokens_map.json": roles,
    }


class _Vocabulary:
    """A vocabulary, with texts, types and scores by id."""

    def __init__(self, kv: Mapping[str, Any]) -> None:
        self.kv, self.vocab = kv, Vocab.from_gguf(kv)
        ids = range(self.vocab.n_tokens)
        self.texts = [self.vocab.text(i) for i in ids]
        half = next((i for i in ids if HALF.search(self.texts[i])), None)
        if half is not None:
            raise ModelError(f"token {half}, {self.texts[half]!r:.60}, is no UTF-8: no file of a folder can say it")
        self.types = [self.vocab.type_of(i) for i in ids]
        scores: Any = kv.get(f"{KEY}scores")
        self.scores: list[float] = (
            [0.0] * len(ids) if scores is None else np.asarray(scores, np.float64)[: len(ids)].tolist()
        )

    def added(self) -> list[Keys]:
        """The tokens that are cut out of a text first of all."""
        return [
            {
                "id": i,
                "content": self.texts[i],
                "single_word": False,
                "lstrip": i in self.vocab.lstrip,
                "rstrip": i in self.vocab.rstrip,
                "normalized": False,
                "special": kind in _SPECIAL,
            }
            for i, kind in enumerate(self.types)
            if kind in _ADDED
        ]

    def ids(self, needed: Container[str] = ()) -> dict[str, int]:
        """The ids, by text, of the tokens in use and of those that are `needed`."""
        ids = enumerate(self.texts)
        return {text: i for i, text in ids if self.types[i] != TokenType.UNUSED or text in needed}

    def frame(self) -> Keys:
        """The `post_processor` that puts tokens before a text and after it."""
        before, after = self.vocab.before, self.vocab.after
        framed = self.vocab.pair("", "")
        middle = framed[len(before) : len(framed) - len(after)]

        def part(ids: list[int], side: int) -> list[Keys]:
            return [{"SpecialToken": {"id": self.texts[i], "type_id": side}} for i in ids]

        a, b = ([{"Sequence": {"id": name, "type_id": side}}] for side, name in enumerate("AB"))
        special = {self.texts[i]: {"id": self.texts[i], "ids": [i], "tokens": [self.texts[i]]} for i in framed}
        return {
            "type": "TemplateProcessing",
            "single": [*part(before, 0), *a, *part(after, 0)],
            "pair": [*part(before, 0), *a, *part(middle, 0), *b, *part(after, 1)],
            "special_tokens": special,
        }

    def roles(self) -> Keys:
        """The texts of tokens that the file names for a role, and of tokens that frame a text. A normal token gets no
        role, because libraries would treat it as special wherever it occurs."""
        vocab = self.vocab
        framing = {"bos": vocab.bos if vocab.add_bos else None, "eos": vocab.eos if vocab.add_eos else None}
        if vocab.kind == "bert":
            framing = {"cls": vocab.cls, "sep": vocab.sep, "unk": vocab.unk}
        found: Keys = {}
        for role, name in ROLES.items():
            i = self.kv.get(f"{KEY}{name}_token_id")
            named = isinstance(i, int) and 0 <= i < len(self.texts) and self.types[i] in _ADDED
            i = i if named else framing.get(role)
            if i is not None:
                found[f"{role}_token"] = self.texts[i]
        return found

    def about(self) -> Keys:
        """The other keys of tokenizer_config.json."""
        about: Keys = {"clean_up_tokenization_spaces": False}  # the decoder cleans up, exactly as the vocabulary does
        if self.vocab.kind != "bert":  # BERT's frame is neither BOS nor EOS
            about |= {"add_bos_token": self.vocab.add_bos, "add_eos_token": self.vocab.add_eos}
        key = "tokenizer.chat_template"
        default = self.kv.get(key)
        names = cast("list[str]", self.kv.get(f"{key}s", []))
        named = {"default": default, **{name: self.kv.get(f"{key}.{name}") for name in names}}
        templates = [{"name": name, "template": t} for name, t in named.items() if isinstance(t, str)]
        if isinstance(default, str) and len(templates) == 1:
            about["chat_template"] = default
        elif templates:
            about["chat_template"] = templates
        return about


# -- kinds -------------------------------------------------------------------------------------------------------------


def _sequence(name: str, parts: list[Keys]) -> Keys:
    return {"type": "Sequence", name: parts}


def _steps(normalizer: Keys | None) -> list[Keys]:
    """The steps of a normalizer that is written here."""
    return [] if normalizer is None else normalizer.get("normalizers", [normalizer])


_BYTE_LEVEL: Keys = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_FUSE: Keys = {"type": "Fuse"}
_OF_BYTES = [
    replace_step(SPACE, " "),
    {"type": "ByteFallback"},
    _FUSE,
]  # for tokens that spell a space U+2581 and a byte <0x00>


def _decoder(v: _Vocabulary, parts: list[Keys]) -> Keys:
    """The `decoder`: `parts`, then the last steps of `Vocab.detokenize`."""
    if v.vocab.add_space_prefix:
        parts = [*parts, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    if v.vocab.clean_spaces:
        contraction = replace_step(" (?='(?:[sm]|re|ve))", "", "Regex")
        parts = [*parts, replace_step(" (?=[?!.,])", "", "Regex"), replace_step(" ' ", "'"), contraction]
    return _sequence("decoders", parts)


def _bpe_model(v: _Vocabulary, merges: list[tuple[str, str]], ignore_merges: bool, as_bytes: bool) -> Keys:
    unk = v.vocab.unk if as_bytes else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unk is None else v.texts[unk],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": as_bytes,
        "byte_fallback": as_bytes,
        "ignore_merges": ignore_merges,
        "vocab": v.ids({text for left, right in merges for text in (left, right, left + right)}),
        "merges": merges,
    }


def _spm(v: _Vocabulary) -> Keys:
    """A SentencePiece BPE vocabulary as merges: every two texts that make a token, the best token first."""
    prefix = v.vocab.add_space_prefix
    put: list[Keys] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    left, right, merged = Texts(v.texts).pairs()  # ids; negative for a character that is not a token
    _refuse_merges_of_characters(v, left, right, merged)
    order = np.lexsort((merged, -np.asarray(v.scores)[merged]))
    order = order[(left[order] >= 0) & (right[order] >= 0)]
    pairs = cast("list[tuple[int, int]]", zip(left[order].tolist(), right[order].tolist(), strict=True))
    merges = [(v.texts[a], v.texts[b]) for a, b in pairs]
    return {
        "normalizer": _sequence("normalizers", [*put, replace_step(" ", SPACE)]),
        "pre_tokenizer": None,
        "post_processor": v.frame(),
        "decoder": _decoder(v, _OF_BYTES),
        "model": _bpe_model(v, merges, False, True),
    }


def _refuse_merges_of_characters(v: _Vocabulary, left: Ints, right: Ints, merged: Ints) -> None:
    """Raise ModelError when a token is made by way of a character that is not a token; merges cannot describe that."""
    if min(left.min(initial=0), right.min(initial=0)) >= 0:
        return
    made = {i for i, text in enumerate(v.texts) if len(text) == 1}
    pairs = cast("list[tuple[int, int, int]]", zip(left.tolist(), right.tolist(), merged.tolist(), strict=True))
    for a, b, token in sorted(pairs, key=lambda pair: len(v.texts[pair[2]])):
        if (a < 0 or a in made) and (b < 0 or b in made):
            made.add(token)
            if min(a, b) < 0:
                char = chr(-1 - min(a, b))
                raise ModelError(
                    f"the token {v.texts[token]!r:.60} is made of {char!r}, which is no token: "
                    "the tokenizers library has no form for that"
                )


def _merges(v: _Vocabulary) -> list[tuple[str, str]]:
    """The file's merges, each once. Raises ModelError for a merge of texts that are not tokens."""
    known, merges = set(v.texts), dict[tuple[str, str], None]()
    for merge in cast("list[str]", v.kv.get(f"{KEY}merges", [])):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        lacking = next((text for text in (left, right, left + right) if text not in known), None)
        if lacking is not None:
            raise ModelError(f"{KEY}merges: {merge!r:.60} needs the token {lacking!r:.60}, which the vocabulary lacks")
        merges[left, right] = None
    return list(merges)


def _byte_level(v: _Vocabulary) -> Keys:
    pre, ignore_merges = steps_of(str(v.kv.get(f"{KEY}pre") or "default"))
    return {
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": v.frame(),
        "decoder": _decoder(v, [*_spelled(v), _BYTE_LEVEL]),
        "model": _bpe_model(v, _merges(v), ignore_merges, False),
    }


def _spelled(v: _Vocabulary) -> list[Keys]:
    """The spelling of an added token in byte characters. Libraries take the text of added tokens to be spelled so
    already."""
    known = set(SPELLING.values())
    texts = [text for text, kind in zip(v.texts, v.types, strict=True) if kind in _ADDED and not text.isascii()]
    return [
        replace_step(rf"\A{re.escape(text)}\z", text.encode().decode("latin-1").translate(SPELLING), "Regex")
        for text in texts
        if known.issuperset(text)
    ]


def _gemma4(v: _Vocabulary) -> Keys:
    return {
        "normalizer": replace_step(" ", SPACE),
        "pre_tokenizer": LINES,
        "post_processor": v.frame(),
        "decoder": _decoder(v, _OF_BYTES),
        "model": _bpe_model(v, _merges(v), False, True),
    }


def _word_piece(v: _Vocabulary) -> Keys:
    if v.vocab.unk is None:
        raise ModelError(f"{KEY}unknown_token_id is missing: WordPiece needs a token for unknown words")
    vocab: dict[str, int] = {}
    shown: list[str] = []  # as they are
    for text, i in v.ids().items():
        if v.types[i] in _ADDED:
            shown.append(re.escape(text))
            vocab[text] = i
        else:
            vocab[text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"] = i
    lowercase = bool(v.kv.get(f"{KEY}normalizer.lowercase", True))
    strip_accents = bool(v.kv.get(f"{KEY}normalizer.strip_accents", lowercase))
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": strip_accents,
        "lowercase": lowercase,
    }
    model = {
        "type": "WordPiece",
        "unk_token": v.texts[v.vocab.unk],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": _MAX_WORD,
        "vocab": vocab,
    }
    words = [
        replace_step(rf"\A(?!{'|'.join(['##', *shown])})", " ", "Regex"),
        replace_step(r"\A##", "", "Regex"),
        _FUSE,
    ]
    return {
        "normalizer": _sequence("normalizers", [*(first_of_decomposed() if strip_accents else []), normalizer]),
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": v.frame(),
        "decoder": _decoder(v, words),
        "model": model,
    }


def _unigram(v: _Vocabulary) -> Keys:
    charsmap, merge = _charsmap(v), _merges_spaces(v)
    prefix, once = v.vocab.add_space_prefix, _prefix_once(v.kv)
    # The library rates an unknown character by the worst token of all, the vocabulary by the worst normal one.
    scores = [s if kind in _BY_SCORE else _NEVER for s, kind in zip(v.scores, v.types, strict=True)]
    scores = [max(s, _NEVER) if kind == TokenType.UNUSED else s for s, kind in zip(scores, v.types, strict=True)]
    normalizers: list[Keys] = []
    apart, together, runs, ends, first = steps_of_scores()
    if charsmap:
        precompiled = {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()}
        normalizers += [apart, precompiled, together]
    if merge:
        normalizers += [runs, ends, {"type": "Prepend", "prepend": SPACE}]
    elif prefix and not once:  # a text of spaces alone gets no prefix
        normalizers.append(first)
    normalizers.append(replace_step(" ", SPACE))
    meta = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False}
    return {
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": meta if prefix and once and not merge else None,
        "post_processor": v.frame(),
        "decoder": _decoder(v, [replace_step(SPACE, " "), _FUSE]),
        "model": {
            "type": "Unigram",
            "unk_id": v.vocab.unk,
            "vocab": [[text, score] for text, score in zip(v.texts, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _charsmap(v: _Vocabulary) -> bytes:
    charsmap: Any = v.kv.get(f"{KEY}precompiled_charsmap")
    return b"" if charsmap is None else np.asarray(charsmap).tobytes()


def _merges_spaces(v: _Vocabulary) -> bool:
    return bool(v.kv.get(f"{KEY}remove_extra_whitespaces", False))


def _prefix_once(kv: Mapping[str, Any]) -> bool:
    return bool(kv.get(f"{KEY}space_prefix_once", False))


def _sentencepiece(v: _Vocabulary) -> SentencePiece:
    """The pieces of tokenizer.model. SentencePiece allows one token of the type UNKNOWN."""
    vocab, unk = v.vocab, v.vocab.unk
    roles = {"unk": unk, "bos": vocab.bos, "eos": vocab.eos, "pad": vocab.pad}
    types = [TokenType.CONTROL if t == TokenType.UNKNOWN and i != unk else t for i, t in enumerate(v.types)]
    types = [TokenType.UNUSED if t == TokenType.UNDEFINED else t for t in types]
    if unk is not None:
        types[unk] = TokenType.UNKNOWN
    return SentencePiece(
        [(text, score, int(kind)) for text, score, kind in zip(v.texts, v.scores, types, strict=True)],
        UNIGRAM if vocab.kind == "t5" else BPE,
        _charsmap(v),
        vocab.add_space_prefix,
        _merges_spaces(v),
        {role: i for role, i in roles.items() if i is not None},
    )
