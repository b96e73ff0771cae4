"""Turn the tokenizer files of a folder into the keys `tokenizer.*` of a GGUF.

tokenizer.model (SentencePiece) is preferred to tokenizer.json, because it has the scores. Roles of tokens and the chat
template come from tokenizer_config.json, then from generation_config.json and config.json.
"""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.llm.vocab.forms import FORM_KEY, FORMS
from pyggml.logger import LOG
from pyggml.small_file import HALF, read_small

from .config import Config
from .parts import Part
from .pretokenizers import expressions_of, name_of
from .sentencepiece import UNIGRAM, parse, parse_charsmap
from .tokenizer_steps import (
    BYTES,
    LINES,
    PIECES,
    SCORES,
    SPACE,
    WORDS,
    check_steps,
    first_of_decomposed,
    steps_of_scores,
)

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TEXT = re.compile("<0x.{2}>", re.DOTALL)
_SENTENCEPIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
ROLES = {  # key in configs -> key in the GGUF
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
_NO_SCORE = -1000.0  # the score of a token that no merge makes
_MAX_SCORE = 3.4e38
_SHOWN = 3  # tokens before a text that an error shows; a vocabulary puts one there
Keys = dict[str, Any]


class _Vocabulary:
    """Tokens by id; ids without a token are padding."""

    def __init__(self, n_vocab: int) -> None:
        if not 0 <= n_vocab <= limits.TOKENIZER_TOKENS:
            raise ModelError(f"vocab_size = {n_vocab}: up to {limits.TOKENIZER_TOKENS} are supported")
        self.texts = [f"[PAD{i}]" for i in range(n_vocab)]
        self.types = [UNUSED] * n_vocab
        self.scores = [-10000.0] * n_vocab

    def put(self, i: int, text: str, kind: int, score: float = 0.0) -> None:
        """Set token `i`. The list grows when the tokenizer has more tokens than the model. Raises ModelError for an id
        that is out of range."""
        if not 0 <= i < limits.TOKENIZER_TOKENS:
            raise ModelError(f"the token {text!r:.60} has the id {i}: 0 to {limits.TOKENIZER_TOKENS - 1} are supported")
        for lacking in range(len(self.texts), i + 1):
            self.texts.append(f"[PAD{lacking}]")
            self.types.append(UNUSED)
            self.scores.append(-10000.0)
        self.texts[i], self.types[i], self.scores[i] = text, kind, score

    def keys(self, model: str, pre: str, scores: bool) -> Keys:
        """The keys of the GGUF."""
        found: Keys = {"model": model, "pre": pre, "tokens": self.texts}
        if scores:
            found["scores"] = np.asarray(self.scores, np.float32)
        return {**found, "token_type": np.asarray(self.types, np.int32)}


@dataclass(frozen=True)
class _Added:
    """A token that is added to the tokenizer's model."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False

    @property
    def kind(self) -> int:
        return CONTROL if self.special else USER_DEFINED


def read_tokenizer(folder: Path, config: Config) -> Keys:
    """The keys `tokenizer.*`. A folder without a tokenizer gets `tokenizer.ggml.model` "none". Raises ModelError for a
    damaged tokenizer, an unknown kind or pre-tokenizer, and too many tokens."""
    n_types = config.get("type_vocab_size", default=None)
    kinds: Keys = {} if n_types is None else {f"{KEY}token_type_count": n_types}  # types of texts, not of tokens
    about = Part.of_file(folder / "tokenizer_config.json")
    tokenizer = Part.of_file(folder / "tokenizer.json")
    sp = next((folder / name for name in _SENTENCEPIECE if (folder / name).exists()), None)
    if sp is None and not tokenizer.values:
        return {f"{KEY}model": "none", **kinds}
    n_vocab = config.get("vocab_size", default=0)
    try:
        vocabulary = _Vocabulary(n_vocab if isinstance(n_vocab, int) else 0)
        if sp is not None and (sp.name == "tokenizer.model" or not tokenizer.values):
            keys = _of_sentencepiece(vocabulary, sp, tokenizer, about)
        else:
            keys = _of_json(vocabulary, tokenizer, about, config)
        keys |= _strips(_added(tokenizer) or (_added_of_config(about) if sp is not None else []))
        keys |= _roles(vocabulary, about, tokenizer, folder, config)
    except ModelError as e:
        where = str(folder)
        raise e if where in str(e) else ModelError(f"{where}: {e}") from None
    found = {f"{KEY}{key}": value for key, value in keys.items()}
    return found | kinds | _chat_templates(folder, about)


# -- kinds -------------------------------------------------------------------------------------------------------------


def _of_sentencepiece(v: _Vocabulary, path: Path, tokenizer: Part, about: Part) -> Keys:
    model = parse(read_small(path, limits.SENTENCEPIECE_BYTES, ModelError), str(path))
    for i, (text, score, kind) in enumerate(model.pieces):
        v.put(i, text, kind, score)
    for a in _added(tokenizer) or _added_of_config(about):
        if not 0 <= a.id < len(model.pieces) or v.types[a.id] not in (CONTROL, UNKNOWN, BYTE):
            v.put(a.id, a.text, a.kind, _NO_SCORE)
    keys = v.keys("t5" if model.model_type == UNIGRAM else "llama", "default", scores=True)
    keys["add_space_prefix"] = model.add_dummy_prefix
    if model.model_type == UNIGRAM:
        keys["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        if model.charsmap:
            keys["precompiled_charsmap"] = np.frombuffer(model.charsmap, np.uint8)
    return keys


def _of_json(v: _Vocabulary, tokenizer: Part, about: Part, config: Config) -> Keys:
    model = tokenizer.part("model")
    kind = model.text("type") or ("BPE" if "merges" in model.values else "?")
    if kind == "BPE":
        return _bpe(v, tokenizer, about, config) | _form(tokenizer)
    if kind == "WordPiece":
        return _word_piece(v, tokenizer, model) | _form(tokenizer)
    if kind == "Unigram":
        return _unigram(v, tokenizer, model) | _form(tokenizer, but="NFKC")  # which becomes a character map
    raise ModelError(f"{tokenizer.where}a tokenizer of the kind {kind} is not supported")


def _ids(model: Part) -> dict[str, int]:
    """The ids by text of a model whose `vocab` is an object. Raises ModelError when two texts have the same id."""
    vocab = model.part("vocab")
    for text, i in vocab.values.items():
        if type(i) is not int:
            vocab.fail(text, "must be a whole number")
    by_id = {i: text for text, i in vocab.values.items()}
    if len(by_id) < len(vocab.values):
        text, i = next((text, i) for text, i in vocab.values.items() if by_id[i] != text)
        raise ModelError(f"{model.where}vocab: {text!r:.60} and {by_id[i]!r:.60} have the same id {i}")
    if HALF.search("".join(vocab.values)):
        raise ModelError(f"{model.where}vocab has a token that is no text of whole characters")
    return dict(vocab.values)


def _merges(model: Part) -> list[tuple[str, str]]:
    """The merges. A file has each as two texts, or as one text with a space between the two."""
    found: list[tuple[str, str]] = []
    for i, merge in enumerate(model.array("merges")):
        parts: Any = merge.split(" ", 1) if isinstance(merge, str) else merge
        if not isinstance(parts, list) or list(map(type, cast("list[Any]", parts))) != [str, str]:
            raise ModelError(f"{model.where}merges[{i}] must be two texts, not {merge!r:.60}")
        left, right = cast("list[str]", parts)
        found.append((left, right))
    if len(set(found)) < len(found):  # of a merge that is listed twice, the library takes the last
        found = list(dict.fromkeys(reversed(found)))[::-1]
    return found


def _joined(model: Part, merges: list[tuple[str, str]]) -> list[str]:
    """The merges as a GGUF has them: two texts with a space between. Raises ModelError for a merge whose first text
    would not be found again."""
    found = [f"{left} {right}" for left, right in merges]
    for (left, right), merge in zip(merges, found, strict=True):
        if not right or merge.find(" ", 1) != len(left) or HALF.search(merge):
            raise ModelError(f"{model.where}merges: {left!r:.60} and {right!r:.60} cannot be merged")
    return found


def _form(tokenizer: Part, but: str = "") -> Keys:
    """The key of the normalization form that texts are brought into. Raises ModelError when there are several."""
    steps = list(tokenizer.steps("normalizer", "normalizers"))
    forms = {kind for step in steps if (kind := step.text("type")) in FORMS}
    if len(forms) > 1:
        raise ModelError(f"{tokenizer.where}normalizer: only one of {', '.join(sorted(map(str, forms)))} is supported")
    forms.discard(but)
    return {FORM_KEY.removeprefix(KEY): form for form in forms}


def _bpe(v: _Vocabulary, tokenizer: Part, about: Part, config: Config) -> Keys:
    model = tokenizer.part("model")
    cuts = tokenizer.steps("pre_tokenizer", "pretokenizers")
    as_bytes = model.flag("byte_fallback") and all(step.text("type") != "ByteLevel" for step in cuts)
    pre = None if as_bytes else name_of(tokenizer)
    if pre is None and not as_bytes:
        text = " then ".join(expressions_of(tokenizer)) or "nothing"
        raise ModelError(f"{tokenizer.where}no pre-tokenizer is known that cuts text with {text:.300}")
    is_gemma4 = pre is None and config.model_type.startswith("gemma4")
    no_prefix = about.values.get("add_prefix_space") is False
    check_steps(tokenizer, BYTES if pre is not None else PIECES, lambda: [LINES] if is_gemma4 else [], no_prefix)
    merges, unk = _merges(model), model.text("unk_token")
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for text, i in _ids(model).items():
        v.put(i, text, _type(text, unk) if as_bytes else NORMAL, -float(ranks[text]) if text in ranks else _NO_SCORE)
    _put_added(v, tokenizer)
    if pre is not None:
        return {**v.keys("gpt2", pre, scores=False), "merges": _joined(model, merges)}
    if is_gemma4:
        return {**v.keys("gemma4", "gemma4", scores=True), "merges": _joined(model, merges)}
    return {**v.keys("llama", "default", scores=True), "add_space_prefix": _puts_space_first(tokenizer)}


def _word_piece(v: _Vocabulary, tokenizer: Part, model: Part) -> Keys:
    check_steps(tokenizer, WORDS, first_of_decomposed)
    steps = tokenizer.steps("normalizer", "normalizers")
    bert = next((step for step in steps if step.text("type") == "BertNormalizer"), None)
    if bert is None:
        raise ModelError(f"{tokenizer.where}normalizer: BertNormalizer is missing, without which no WordPiece is read")
    prefix = "##"
    if model.text("continuing_subword_prefix") not in (None, prefix):
        model.fail("continuing_subword_prefix", f"must be {prefix}")
    lowercase = bert.flag("lowercase", True)
    _put_added(v, tokenizer)
    special = {a.text for a in _added(tokenizer)}
    for text, i in _ids(model).items():
        if text not in special:  # a piece that begins a word has a space before it, other pieces nothing
            v.put(i, text.removeprefix(prefix) if text.startswith(prefix) else SPACE + text, NORMAL)
    found = v.keys("bert", "default", scores=False)
    return {
        **found,
        "normalizer.lowercase": lowercase,
        "normalizer.strip_accents": bert.flag("strip_accents", lowercase),
    }


def _unigram(v: _Vocabulary, tokenizer: Part, model: Part) -> Keys:
    check_steps(tokenizer, SCORES, steps_of_scores)
    unk_id, unk = model.number("unk_id"), model.text("unk_token")
    if unk_id is None and unk is None:
        model.fail("unk_id", "must be the id of the unknown token")
    for i, pair in enumerate(model.array("vocab")):
        text, score = _scored(model, i, pair)
        v.put(i, text, UNKNOWN if i == unk_id else _type(text, unk), score)
    for a in _added(tokenizer):
        known = 0 <= a.id < len(v.types)
        if not known or v.types[a.id] != UNKNOWN:
            v.put(a.id, a.text, a.kind, v.scores[a.id] if known else _NO_SCORE)
    merges_spaces = cuts_at_spaces = False
    keys: Keys = {}
    for n in tokenizer.steps("normalizer", "normalizers"):
        kind, charsmap = n.text("type"), n.text("precompiled_charsmap")
        if kind == "Replace" and n.text("content") in (" ", SPACE) and n.part("pattern").text("String") != " ":
            merges_spaces = True
        if charsmap:
            keys["precompiled_charsmap"] = np.frombuffer(_decoded(n, charsmap), np.uint8)
        elif kind == "NFKC":
            keys["precompiled_charsmap"] = np.frombuffer(_nfkc(), np.uint8)
    for p in tokenizer.steps("pre_tokenizer", "pretokenizers"):
        cuts_at_spaces |= p.text("type") == "WhitespaceSplit"
    keys |= {
        **v.keys("t5", "default", scores=True),
        "add_space_prefix": _puts_space_first(tokenizer),
        "remove_extra_whitespaces": merges_spaces or cuts_at_spaces,
    }
    if not keys["remove_extra_whitespaces"]:
        keys["space_prefix_once"] = True  # read by llm/vocab/kinds/ugm.py
    return keys


def _scored(model: Part, i: int, pair: Any) -> tuple[str, float]:
    """The text and the score of token `i` of a Unigram model."""
    if isinstance(pair, list) and len(cast("list[Any]", pair)) == 2:
        text, score = cast("list[Any]", pair)
        numeric = type(score) in (int, float) and abs(score) <= _MAX_SCORE
        if isinstance(text, str) and numeric and not HALF.search(text):
            return text, float(score)
    raise ModelError(f"{model.where}vocab[{i}] must be a text and a number that F32 has, not {pair!r:.60}")


def _decoded(part: Part, charsmap: str) -> bytes:
    try:
        return b64decode(charsmap)
    except ValueError:
        part.fail("precompiled_charsmap", "must be Base64")


def _nfkc() -> bytes:
    """The character map of NFKC, in SentencePiece's format."""
    from sentencepiece import SentencePieceNormalizer

    return parse_charsmap(SentencePieceNormalizer(rule_name="nfkc").serialized_model_proto())


# -- tokens ------------------------------------------------------------------------------------------------------------


def _type(text: str, unk: str | None) -> int:
    if text == unk:
        return UNKNOWN
    return BYTE if _BYTE_TEXT.fullmatch(text) else NORMAL


def _added(tokenizer: Part) -> list[_Added]:
    """The tokens that are added to the model's. Raises ModelError when two have the same id."""
    found: dict[int, _Added] = {}
    for part in tokenizer.parts("added_tokens"):
        i = part.number("id")
        if i is None:
            part.fail("id", "must be a whole number")
        _add(found, part, i)
    return list(found.values())


def _added_of_config(about: Part) -> list[_Added]:
    """The added tokens of tokenizer_config.json, for folders whose tokenizer.json lists none."""
    found: dict[int, _Added] = {}
    of_config = about.part("added_tokens_decoder")
    for i in of_config.values:
        if re.fullmatch("[0-9]{1,12}", i) is None:
            of_config.fail(i, "has no token id for its name: it")
        _add(found, of_config.part(i), int(i))
    return list(found.values())


def _add(found: dict[int, _Added], part: Part, i: int) -> None:
    text = part.text("content")
    if text is None:
        part.fail("content", "must be a string")
    if i in found and found[i].text != text:
        raise ModelError(f"{part.where}content: {text!r:.60} and {found[i].text!r:.60} have the same id {i}")
    if part.flag("single_word"):
        LOG.warning("%scontent: %.60r is found inside words, too, though single_word is true", part.where, text)
    found[i] = _Added(i, text, part.flag("special"), part.flag("lstrip"), part.flag("rstrip"))


def _strips(added: list[_Added]) -> Keys:
    """The keys of the tokens that swallow white space, which only pyggml writes. Without such tokens there are none."""
    found = {
        "lstrip_tokens": [a.id for a in added if a.lstrip],
        "rstrip_tokens": [a.id for a in added if a.rstrip],
    }
    return {key: np.asarray(ids, np.int32) for key, ids in found.items() if ids}


def _put_added(v: _Vocabulary, tokenizer: Part) -> None:
    for a in _added(tokenizer):
        known = 0 <= a.id < len(v.types) and v.types[a.id] == UNKNOWN
        v.put(a.id, a.text, UNKNOWN if known else a.kind)


def _puts_space_first(tokenizer: Part) -> bool:
    before = tokenizer.steps("normalizer", "normalizers")
    for p in chain(before, tokenizer.steps("pre_tokenizer", "pretokenizers")):
        kind = p.text("type")
        if kind == "Metaspace" and p.text("prepend_scheme") != "never" and p.flag("add_prefix_space", True):
            return True
        if kind == "Prepend":
            return True
    return False


# -- roles -------------------------------------------------------------------------------------------------------------


def _roles(v: _Vocabulary, about: Part, tokenizer: Part, folder: Path, config: Config) -> Keys:
    ids = {text: i for i, text in enumerate(v.texts)}
    generation = Part.of_file(folder / "generation_config.json")
    keys: Keys = {}
    for role, name in ROLES.items():
        key = f"{role}_token"
        text = about.part(key).text("content") if isinstance(about.values.get(key), dict) else about.text(key)
        found: Any = None if text is None else ids.get(text)
        for values in (generation.values, config.values):
            if found is None:
                said: Any = values.get(f"{role}_token_id")
                found = cast("list[Any]", said)[0] if isinstance(said, list) and said else cast("Any", said)
        if type(found) is int and 0 <= found < len(v.texts):
            keys[f"{name}_token_id"] = found
    model = tokenizer.part("model")
    unk = model.text("unk_token")
    spelled = model.part("vocab").values if isinstance(model.values.get("vocab"), dict) else ids  # WordPiece's differ
    unknown = model.number("unk_id") if unk is None else spelled.get(unk, ids.get(unk))
    if unknown is not None and 0 <= unknown < len(v.texts):
        keys["unknown_token_id"] = unknown
    before, after = _frame(tokenizer)
    is_words = model.text("type") == "WordPiece"
    if is_words and before and after:
        keys |= {"bos_token_id": before[0], "cls_token_id": before[0], "seperator_token_id": after[-1]}
    elif before and "bos_token_id" not in keys:
        keys["bos_token_id"] = before[0]
    for flag, role, framed in (("add_bos_token", "bos", before), ("add_eos_token", "eos", after)):
        if about.values.get(flag) is not None:
            keys[flag] = about.flag(flag)
        elif framed:
            known = [keys.get(f"{name}_token_id") for name in (role, "cls", "seperator")]
            keys[flag] = framed[0] in known
            if len(framed) > 1 or not keys[flag]:
                side = "before" if role == "bos" else "after"
                LOG.warning("%spost_processor puts %s %s a text, pyggml does not", tokenizer.where, framed, side)
    return keys


def _frame(tokenizer: Part) -> tuple[list[int], list[int]]:
    """The first tokens that the post-processor puts before a text and after it. Raises ModelError when it leaves the
    text out or says it twice."""
    for p in tokenizer.steps("post_processor", "processors"):
        kind = p.text("type")
        if kind in ("BertProcessing", "RobertaProcessing"):
            return [_id_of(p, "cls")], [_id_of(p, "sep")]
        if kind == "TemplateProcessing":
            parts = p.parts("single")
            texts = [i for i, part in enumerate(parts) if "Sequence" in part.values]
            if len(texts) != 1:
                p.fail("single", "must have one Sequence")
            sides = parts[: texts[0]], parts[texts[0] + 1 :]
            before, after = ([*islice((i for part in side for i in _framing(p, part)), _SHOWN)] for side in sides)
            return before, after
    return [], []


def _id_of(post_processor: Part, key: str) -> int:
    """The id of a token that is given as a text and an id."""
    found = post_processor.array(key)
    if len(found) != 2 or type(found[1]) is not int:
        post_processor.fail(key, "must be a text and a token id")
    return found[1]


def _framing(post_processor: Part, part: Part) -> list[int]:
    """The tokens that a part of a post-processor's template stands for."""
    name = part.part("SpecialToken").text("id")
    if name is None:
        part.fail("SpecialToken", "must be an object with an id")
    special = post_processor.part("special_tokens").part(name)
    ids = special.array("ids")
    if not ids or not all(type(i) is int for i in ids):
        special.fail("ids", "must be an array of token ids")
    return ids


def _chat_templates(folder: Path, about: Part) -> Keys:
    """The chat template, and further templates by name."""
    key = "chat_template"
    path = folder / "chat_template.jinja"
    if path.exists():
        return {f"tokenizer.{key}": _template(path)}
    source = about if about.values.get(key) is not None else Part.of_file(folder / "chat_template.json")
    if not isinstance(source.values.get(key), list):
        template = source.text(key)
        return {} if template is None else {f"tokenizer.{key}": template}
    named: dict[str, str] = {}
    for part in source.parts(key):
        name, template = part.text("name"), part.text("template")
        if name is None or template is None:
            part.fail("name" if name is None else "template", "must be a string")
        named[name] = template
    found: Keys = {f"tokenizer.{key}": named.pop("default")} if "default" in named else {}
    if named:
        found[f"tokenizer.{key}s"] = sorted(named)
    return found | {f"tokenizer.{key}.{name}": text for name, text in named.items()}


def _template(path: Path) -> str:
    try:
        return read_small(path, limits.TEXT_FILE_BYTES, ModelError).decode()
    except ValueError:
        raise ModelError(f"{path}: is no UTF-8") from None
