"""The steps of a tokenizer.json that a vocabulary does. It does not do all that the tokenizers library can, and a step
that is left out without a word would give other ids than the model was trained on: such a file is refused.

The keys of a GGUF say the rest; see `tokenizer.py`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from pyggml.errors import ModelError
from pyggml.llm.vocab.forms import FORMS

from .parts import Part

SPACE = "▁"
BYTES, PIECES, WORDS, SCORES = "byte-level BPE", "BPE", "WordPiece", "Unigram"
_APART = "\ufdd0"  # not a character, and in no character map
LINES = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}  # Gemma 4


def replace_step(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    """A step that replaces what a pattern finds, a `kind` of "String" or "Regex"."""
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


@cache
def first_of_decomposed() -> list[dict[str, Any]]:
    """The steps that replace a character by the first of its parts and drop all marks, as llama.cpp does. BERT's own
    normalizer drops some marks only."""
    groups: dict[str, str] = {}
    for char in map(chr, range(0xC0, 0x110000)):
        if unicodedata.decomposition(char) or "\uac00" <= char <= "\ud7a3":
            first, *rest = unicodedata.normalize("NFD", char)
            if any(unicodedata.category(c) != "Mn" for c in rest) and not unicodedata.category(first).startswith("M"):
                groups[first] = groups.get(first, "") + char
    parts = [replace_step(f"[{chars}]", first, "Regex") for first, chars in groups.items()]
    return [*parts, replace_step(r"[\p{Mc}\p{Me}]", "", "Regex")]


@cache
def steps_of_scores() -> list[dict[str, Any]]:
    """Steps for a Unigram model: put characters apart that the library would look up together, take away what stands
    between them, make one space of several, drop the first and the last one, put one before a text."""
    return [
        replace_step(_before_marks(), _APART, "Regex"),
        replace_step(_APART, ""),
        replace_step(" {2,}", " ", "Regex"),
        replace_step("^ | $", "", "Regex"),
        replace_step(r"\A(?= *+[^ ])", SPACE, "Regex"),
    ]


def _before_marks() -> str:
    """A pattern of the places between a character that the map changes and a mark. The library looks both up together
    and loses the mark, so something has to stand between them."""
    changed = [c for c in map(chr, range(0x110000)) if unicodedata.decomposition(c).startswith("<")]
    return rf"(?<=[{''.join(changed)}])(?=\p{{M}})"


def check_steps(
    tokenizer: Part, kind: str, written: Callable[[], list[dict[str, Any]]] = list, prefix_is_set: bool = False
) -> None:
    """Raise ModelError for a normalizer, a pre-tokenizer or a setting of the model that a vocabulary of the `kind` has
    no form for. `written` gives steps that are taken nevertheless: those that `export_tokenizer.py` writes.
    `prefix_is_set`: tokenizer_config.json says that no space is put before a text."""
    model = tokenizer.part("model")
    if kind in (BYTES, PIECES):
        _check_bpe(model)
    writes_spaces = kind in (BYTES, WORDS)  # whether a space need not become U+2581
    normalizers = list(tokenizer.steps("normalizer", "normalizers"))
    names = [step.text("type") for step in normalizers]
    if names.count("Prepend") > 1:
        _refuse(tokenizer, "normalizer: more than one Prepend", kind)
    if "NFKC" in names and "Precompiled" in names:
        _refuse(tokenizer, "normalizer: both NFKC and Precompiled", kind)
    replaced = merges_spaces = False
    for step in normalizers:
        try:
            _check_normalizer(step, kind, replaced)
        except ModelError:
            if step.values not in written():
                raise
            replaced |= kind == SCORES and step.text("content") == SPACE
            continue
        replaced |= step.text("type") in ("Replace", "Prepend", "Precompiled", "BertNormalizer")
        merges_spaces |= _is_runs_of_spaces(step)
        writes_spaces |= _is_replace(step, " ", SPACE) or (_is_runs_of_spaces(step) and step.text("content") == SPACE)
    done, cuts = False, list[str | None]()
    for step in tokenizer.steps("pre_tokenizer", "pretokenizers"):
        try:
            _check_cut(step, kind, prefix_is_set, done)
        except ModelError:
            if step.values not in written():
                raise
        cuts.append(step.text("type"))
        done |= cuts[-1] in ("Metaspace", "BertPreTokenizer")
    if kind == BYTES and "ByteLevel" not in cuts:
        _refuse(tokenizer, "pre_tokenizer: ByteLevel is missing", kind)
    if kind == SCORES and "Prepend" in names and {"Metaspace", "WhitespaceSplit"}.intersection(cuts):
        _refuse(tokenizer, "normalizer: Prepend beside a pre-tokenizer for spaces", kind)
    if "Strip" in names and not (merges_spaces or "WhitespaceSplit" in cuts):
        _refuse(tokenizer, "normalizer: Strip without a Replace that makes one space of several", kind)
    if kind == WORDS and not done:
        _refuse(tokenizer, "pre_tokenizer: BertPreTokenizer is missing", kind)
    if kind in (PIECES, SCORES) and not (done or writes_spaces):
        _refuse(tokenizer, "nothing turns spaces into U+2581", kind)


def _refuse(part: Part, what: str, kind: str) -> NoReturn:
    raise ModelError(f"{part.where}{what}: this is not supported in a tokenizer of the kind {kind}")


def _check_bpe(model: Part) -> None:
    if model.values.get("dropout") not in (None, 0):
        model.fail("dropout", "must be 0: merges are never left out at random")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(key):
            model.fail(key, "must be empty")


def _check_normalizer(step: Part, kind: str, replaced: bool) -> None:
    name = step.text("type")
    if name in FORMS and (name == "NFC" or not replaced):
        return
    if kind in (PIECES, SCORES) and name == "Prepend" and step.text("prepend") == SPACE:
        return
    if kind in (PIECES, SCORES) and _is_replace(step, " ", SPACE):
        return
    if kind == SCORES and (name in ("Precompiled", "Strip") or _is_runs_of_spaces(step)):
        return
    if kind == WORDS and name == "BertNormalizer":
        for key in ("clean_text", "handle_chinese_chars"):
            if not step.flag(key, True):
                step.fail(key, "must be true")
        return
    _refuse(step, f"type: {name}", kind)


def _check_cut(step: Part, kind: str, prefix_is_set: bool, done: bool) -> None:
    name = step.text("type")
    if kind == BYTES:  # the pre-tokenizer has a name, which says what it cuts
        if name == "ByteLevel" and step.flag("add_prefix_space") and not prefix_is_set:
            step.fail("add_prefix_space", "must be false")
        if name == "Split" and not _isolates(step):
            step.fail("behavior", "must be Isolated")
        if name == "Punctuation" and step.text("behavior") not in (None, "Isolated", "Contiguous"):
            step.fail("behavior", "must be Isolated or Contiguous")
        return
    if kind in (PIECES, SCORES) and name == "Metaspace":
        if step.text("replacement") not in (None, SPACE):
            step.fail("replacement", "must be U+2581")
        return
    if kind == PIECES and name == "Split" and step.part("pattern").text("String") == " ":
        return  # Gemma's: no space is left by then
    if kind == WORDS and name == "BertPreTokenizer":
        return
    if kind == SCORES and name == "WhitespaceSplit" and not done:
        return
    _refuse(step, f"type: {name}", kind)


def _isolates(step: Part) -> bool:
    """Whether a Split keeps what it finds, and what is between, as parts of their own."""
    behavior = step.text("behavior")
    return behavior in (None, "Isolated") or (behavior == "Removed" and step.flag("invert"))


def _is_replace(step: Part, pattern: str, content: str) -> bool:
    return (
        step.text("type") == "Replace"
        and step.part("pattern").text("String") == pattern
        and step.text("content") == content
    )


def _is_runs_of_spaces(step: Part) -> bool:
    """Whether a Replace makes one space of several."""
    regex = step.part("pattern").text("Regex") if step.text("type") == "Replace" else None
    return regex in (" {2,}", " +", r"\s+", "▁{2,}") and step.text("content") in (" ", SPACE)
