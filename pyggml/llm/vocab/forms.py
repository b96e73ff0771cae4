"""Unicode's normalization forms. A file's key `tokenizer.ggml.normalizer.form`, which only pyggml writes, names the
form that the texts of a vocabulary are in; files without it have none, as in llama.cpp."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal

from pyggml.errors import ModelError

from .tokens import KEY

if TYPE_CHECKING:
    import re

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
FORM_KEY = f"{KEY}normalizer.form"


def form_of(kv: Mapping[str, object]) -> Form | None:
    """The form that a file names. Raises ModelError when there is no such form."""
    form = kv.get(FORM_KEY)
    if form is not None and (not isinstance(form, str) or form not in FORMS):
        raise ModelError(f"{FORM_KEY} must be one of {', '.join(FORMS)}, not {form!r:.60}")
    return form


def normalize(form: Form, text: str) -> str:
    """A text in a normalization form. Python takes the square of the length of a run of marks that are out of order, so
    long runs are put in order before."""
    if text.isascii():
        return text
    return unicodedata.normalize(form, _marks().sub(_in_order, text))


@cache
def _marks() -> re.Pattern[str]:
    import regex

    return regex.compile(r"\P{ccc=0}{32,}")  # pyright: ignore[reportReturnType]


def _in_order(found: re.Match[str]) -> str:
    marks = "".join([unicodedata.normalize("NFD", c) for c in found[0]])
    return "".join(sorted(marks, key=unicodedata.combining))
