"""The vocabulary of a folder as the keys `tokenizer.*` of a GGUF, which say the same in llama.cpp's terms.

tokenizer.model (SentencePiece) comes first where there is one, as it has the scores; else tokenizer.json. Roles of
tokens and the chat template are tokenizer_config.json's, then generation_config.json's and config.json's.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from pyggml.errors import ModelError

from .config import Config, read_json
from .pretokenizers import expressions_of, name_of
from .sentencepiece import UNIGRAM, parse, parse_charsmap

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
_SENTENCEPIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
ROLES = {  # in configs -> in the GGUF
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
_MAX_VOCAB = 1 << 24
_NO_SCORE = -1000.0  # of a token that no merge makes
Keys = dict[str, Any]


class _Vocabulary:
    """Tokens by id; what has none is padding."""

    def __init__(self, n_vocab: int) -> None:
        if not 0 <= n_vocab <= _MAX_VOCAB:
            raise ModelError(f"vocab_size = {n_vocab}: up to {_MAX_VOCAB} are supported")
        self.texts = [f"[PAD{i}]" for i in range(n_vocab)]
        self.types = [UNUSED] * n_vocab
        self.scores = [-10000.0] * n_vocab

    def put(self, i: int, text: str, kind: int, score: float = 0.0) -> None:
        """Token `i`; the list grows where a tokenizer has more than the model."""
        for lacking in range(len(self.texts), i + 1):
            self.texts.append(f"[PAD{lacking}]")
            self.types.append(UNUSED)
            self.scores.append(-10000.0)
        self.texts[i], self.types[i], self.scores[i] = text, kind, score

    def keys(self, model: str, pre: str, scores: bool) -> Keys:
        """As the GGUF has them."""
        found: Keys = {"model": model, "pre": pre, "tokens": self.texts}
        if scores:
            found["scores"] = np.asarray(self.scores, np.float32)
        return {**found, "token_type": np.asarray(self.types, np.int32)}


def read_tokenizer(folder: Path, config: Config) -> Keys:
    """The keys; `tokenizer.ggml.model` is none where a folder has no tokenizer. Raises ModelError for one of a kind, or
    with a pre-tokenizer, that is not known."""
    n_types = config.get("type_vocab_size", default=None)
    kinds: Keys = {} if n_types is None else {f"{KEY}token_type_count": n_types}  # of texts, not of tokens
    about = read_json(folder / "tokenizer_config.json")
    tokenizer = read_json(folder / "tokenizer.json")
    n_vocab = config.get("vocab_size", default=0)
    vocabulary = _Vocabulary(n_vocab if isinstance(n_vocab, int) else 0)
    sp = next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    try:
        if sp is not None and sp.name == "tokenizer.model":
            keys = _of_sentencepiece(vocabulary, sp, tokenizer, about)
        elif tokenizer:
            keys = _of_json(vocabulary, tokenizer, config, folder)
        elif sp is not None:
            keys = _of_sentencepiece(vocabulary, sp, tokenizer, about)
        else:
            return {f"{KEY}model": "none", **kinds}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ModelError(f"{folder}: its tokenizer is damaged: {e!r}") from None
    keys |= _roles(vocabulary, about, tokenizer, folder, config)
    found = {f"{KEY}{key}": value for key, value in keys.items()}
    return found | kinds | _chat_templates(folder, about)


# -- kinds -------------------------------------------------------------------------------------------------------------


def _of_sentencepiece(v: _Vocabulary, path: Path, tokenizer: Keys, about: Keys) -> Keys:
    model = parse(path.read_bytes(), str(path))
    for i, (text, score, kind) in enumerate(model.pieces):
        v.put(i, text, kind, score)
    for a in _added(tokenizer, about):
        if a["id"] >= len(model.pieces) or v.types[a["id"]] not in (CONTROL, UNKNOWN, BYTE):
            v.put(a["id"], a["content"], _added_type(a), _NO_SCORE)
    keys = v.keys("t5" if model.model_type == UNIGRAM else "llama", "default", scores=True)
    keys["add_space_prefix"] = model.add_dummy_prefix
    if model.model_type == UNIGRAM:
        keys["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        if model.charsmap:
            keys["precompiled_charsmap"] = np.frombuffer(model.charsmap, np.uint8)
    return keys


def _of_json(v: _Vocabulary, tokenizer: Keys, config: Config, folder: Path) -> Keys:
    model: Keys = tokenizer["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "?")
    make = {"BPE": _bpe, "WordPiece": _word_piece, "Unigram": _unigram}.get(kind)
    if make is None:
        raise ModelError(f"{folder / 'tokenizer.json'}: a tokenizer of the kind {kind} is not supported")
    if kind == "BPE" and not model.get("byte_fallback") and name_of(tokenizer) is None:
        text = " then ".join(expressions_of(tokenizer)) or "nothing"
        raise ModelError(f"{folder / 'tokenizer.json'}: no pre-tokenizer is known that cuts text with {text:.300}")
    return make(v, tokenizer, model, config)


def _bpe(v: _Vocabulary, tokenizer: Keys, model: Keys, config: Config) -> Keys:
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in cast("list[Any]", model["merges"])]
    as_bytes = bool(model.get("byte_fallback"))
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for text, i in model["vocab"].items():
        v.put(i, text, _type(text, model) if as_bytes else NORMAL, -float(ranks[text]) if text in ranks else _NO_SCORE)
    _put_added(v, tokenizer)
    joined = [f"{left} {right}" for left, right in merges]
    if not as_bytes:
        return {**v.keys("gpt2", str(name_of(tokenizer)), scores=False), "merges": joined}
    if config.model_type.startswith("gemma4"):
        return {**v.keys("gemma4", "gemma4", scores=True), "merges": joined}
    return {**v.keys("llama", "default", scores=True), "add_space_prefix": _puts_space_first(tokenizer)}


def _word_piece(v: _Vocabulary, tokenizer: Keys, model: Keys, config: Config) -> Keys:
    prefix = model.get("continuing_subword_prefix", "##")
    _put_added(v, tokenizer)
    special = {a["content"] for a in tokenizer.get("added_tokens", ())}
    for text, i in model["vocab"].items():
        if text not in special:  # words begin with a space, the rest of words with nothing
            v.put(i, text.removeprefix(prefix) if text.startswith(prefix) else SPACE + text, NORMAL)
    return v.keys("bert", "default", scores=False)


def _unigram(v: _Vocabulary, tokenizer: Keys, model: Keys, config: Config) -> Keys:
    for i, (text, score) in enumerate(cast("list[tuple[str, float]]", model["vocab"])):
        v.put(i, text, UNKNOWN if i == model.get("unk_id") else _type(text, model), score)
    for a in tokenizer.get("added_tokens", ()):
        added = int(a["id"])
        if v.types[added] != UNKNOWN:
            v.put(added, a["content"], _added_type(a), v.scores[added])
    normalizers = _flat(tokenizer.get("normalizer"), "normalizers")
    merges_spaces = any(n.get("type") == "Replace" and n.get("content") in (" ", SPACE) for n in normalizers)
    cuts = _flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    keys = {
        **v.keys("t5", "default", scores=True),
        "add_space_prefix": _puts_space_first(tokenizer),
        "remove_extra_whitespaces": merges_spaces or any(p.get("type") == "WhitespaceSplit" for p in cuts),
    }
    if not keys["remove_extra_whitespaces"]:
        keys["space_prefix_once"] = True  # read by llm/vocab/kinds/ugm.py
    for n in normalizers:
        if n.get("precompiled_charsmap"):
            keys["precompiled_charsmap"] = np.frombuffer(b64decode(n["precompiled_charsmap"]), np.uint8)
        elif n.get("type") == "NFKC":
            keys["precompiled_charsmap"] = np.frombuffer(_nfkc(), np.uint8)
    return keys


def _nfkc() -> bytes:
    """NFKC as SentencePiece spells it."""
    from sentencepiece import SentencePieceNormalizer

    return parse_charsmap(SentencePieceNormalizer(rule_name="nfkc").serialized_model_proto())


# -- tokens ------------------------------------------------------------------------------------------------------------


def _type(text: str, model: Keys) -> int:
    if text == model.get("unk_token"):
        return UNKNOWN
    return BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else NORMAL


def _added(tokenizer: Keys, about: Keys) -> list[Keys]:
    """Tokens besides the model's, of tokenizer.json, else of tokenizer_config.json."""
    of_config = cast("Mapping[str, Keys]", about.get("added_tokens_decoder") or {})
    return tokenizer.get("added_tokens") or [{**a, "id": int(i)} for i, a in of_config.items()]


def _added_type(a: Keys) -> int:
    return CONTROL if a.get("special") else USER_DEFINED


def _put_added(v: _Vocabulary, tokenizer: Keys) -> None:
    for a in tokenizer.get("added_tokens", ()):
        i = int(a["id"])
        known = i < len(v.types) and v.types[i] == UNKNOWN
        v.put(i, a["content"], UNKNOWN if known else _added_type(a))


def _flat(part: Any, name: str) -> list[Keys]:
    if not part:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]


def _puts_space_first(tokenizer: Keys) -> bool:
    parts = _flat(tokenizer.get("normalizer"), "normalizers") + _flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    meta = [p for p in parts if p.get("type") == "Metaspace"]
    by_meta = any(p.get("prepend_scheme", "always") != "never" and p.get("add_prefix_space", True) for p in meta)
    return by_meta or any(p.get("type") == "Prepend" for p in parts)


# -- roles -------------------------------------------------------------------------------------------------------------


def _roles(v: _Vocabulary, about: Keys, tokenizer: Keys, folder: Path, config: Config) -> Keys:
    ids = {text: i for i, text in enumerate(v.texts)}
    generation = read_json(folder / "generation_config.json")
    keys: Keys = {}
    for role, name in ROLES.items():
        token: Any = about.get(f"{role}_token")
        text = cast("Keys", token).get("content") if isinstance(token, dict) else token
        found: Any = ids.get(cast("str", text)) if text is not None else None
        for values in (generation, config.values):
            if found is None:
                said: Any = values.get(f"{role}_token_id")
                found = cast("list[Any]", said)[0] if isinstance(said, list) and said else cast("Any", said)
        if type(found) is int and 0 <= found < len(v.texts):
            keys[f"{name}_token_id"] = found
    model: Keys = tokenizer.get("model") or {}
    unknown = ids.get(model.get("unk_token") or "", model.get("unk_id"))
    if type(unknown) is int:
        keys.setdefault("unknown_token_id", unknown)
    first, last = _frame(tokenizer)
    if model.get("type") == "WordPiece" and first is not None and last is not None:
        keys = {"cls_token_id": first, "seperator_token_id": last, **keys}
    for flag, role, framed in (("add_bos_token", "bos", first), ("add_eos_token", "eos", last)):
        wanted = about.get(flag)
        if isinstance(wanted, bool):
            keys[flag] = wanted
        elif framed is not None:
            keys[flag] = framed in [keys.get(f"{name}_token_id") for name in (role, "cls", "seperator")]
    return keys


def _frame(tokenizer: Keys) -> tuple[int | None, int | None]:
    """The tokens that the post-processor puts before a text and after it."""
    for p in _flat(tokenizer.get("post_processor"), "processors"):
        if p.get("type") != "TemplateProcessing":
            continue
        single = cast("Sequence[Keys]", p["single"])

        def token(part: Keys, of: Keys = p) -> int | None:
            special = part.get("SpecialToken")
            return None if special is None else int(of["special_tokens"][special["id"]]["ids"][0])

        return token(single[0]), token(single[-1])
    return None, None


def _chat_templates(folder: Path, about: Keys) -> Keys:
    """One template, and those with a name besides."""
    template: Any = about.get("chat_template")
    path = folder / "chat_template.jinja"
    if path.is_file():
        template = path.read_text(encoding="utf-8")
    elif template is None:
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = {t["name"]: t["template"] for t in cast("list[Keys]", template or [])}
    found: Keys = {"tokenizer.chat_template": named.pop("default")} if "default" in named else {}
    if named:
        found["tokenizer.chat_templates"] = sorted(named)
    return found | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
