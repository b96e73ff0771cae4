"""The kinds of tokenizers, and the defaults of each for keys that a file lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pyggml.errors import ModelError
from pyggml.logger import LOG

from ..roles import Roles
from ..tokens import KEY, Tokens, flag

if TYPE_CHECKING:
    from .pre import Pre


class Tokenizer(Protocol):
    """The part of a vocabulary that its kind decides."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens. Surrogates stand for bytes that are not UTF-8."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        ...


@dataclass
class Kind:
    """The defaults of a kind; the file's keys override them.

    frame       how add_special frames a text: "flags" (bos and eos, by add_bos and add_eos), "cls" (always bos and
                sep), "none"
    plain       all tokens but control tokens are shown by `piece`, whatever their type
    """

    roles: Roles
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    clean_spaces: bool = False
    frame: str = "flags"
    plain: bool = False
    pre: Pre | None = field(default=None, repr=False)


def kind_of(model: str, kv: Mapping[str, object]) -> Kind:
    """The defaults of a `tokenizer.ggml.model`. Raises ModelError for an unknown one."""
    if model == "llama":
        return Kind(Roles(bos=1, eos=2, unk=0), add_bos=True, add_space_prefix=True)
    if model == "bert":
        roles = Roles(bos=101, unk=100, sep=102, pad=0, mask=103)
        return Kind(roles, add_bos=True, add_sep=True, clean_spaces=True, frame="cls")
    if model in ("gpt2", "gemma4", "whitespace", "hybriddna"):
        pre = _pre(model, kv)
        default = None if model == "gemma4" else 11
        return Kind(
            Roles(bos=None if pre.no_bos else default, eos=default),
            add_bos=pre.add_bos,
            add_sep=pre.add_sep,
            clean_spaces=pre.clean_spaces,
            pre=pre,
        )
    if model == "t5":
        return Kind(Roles(eos=1, unk=2, pad=0), add_eos=True)
    if model == "rwkv":
        return Kind(Roles(), frame="none", plain=True)
    if model == "plamo2":
        return Kind(Roles(bos=1, eos=2, unk=0, pad=3), frame="none", plain=True)
    known = "llama, gpt2, bert, t5, rwkv, plamo2, gemma4, whitespace, hybriddna, none"
    raise ModelError(f"unknown tokenizer {model!r} ({KEY}model); known are: {known}")


def make_tokenizer(model: str, kind: Kind, tokens: Tokens, roles: Roles, kv: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a kind. Raises ModelError when something that it needs is missing. Large tables are built later,
    when they are used; only this kind's module is imported."""
    if kind.pre is not None:
        from .bpe import BPE, HybridDNA, Whitespace

        if model == "whitespace":
            return Whitespace(tokens, kind.pre, kv, flag(kv, "normalizer.lowercase", False))
        return (HybridDNA if model == "hybriddna" else BPE)(tokens, kind.pre, kv)
    if model == "bert":
        from .wpm import WPM

        lowercase = flag(kv, "normalizer.lowercase", True)
        return WPM(tokens, roles.unk, lowercase, flag(kv, "normalizer.strip_accents", lowercase))
    if model == "t5":
        from .ugm import UGM

        return UGM(tokens, roles.unk, kv, kind.add_space_prefix, flag(kv, "remove_extra_whitespaces", False))
    if model == "rwkv":
        from .rwkv import RWKV

        return RWKV(tokens, roles.unk)
    if model == "plamo2":
        from .plamo2 import PLaMo2

        return PLaMo2(tokens)
    from .spm import SPM

    return SPM(tokens, roles.unk)


def _pre(model: str, kv: Mapping[str, object]) -> Pre:
    from .pre import find_pre

    said = kv.get(f"{KEY}pre")
    name = "gemma4" if model == "gemma4" else "default" if said is None else said
    if not isinstance(name, str):
        raise ModelError(f"{KEY}pre is not a string: {name!r}")
    name = name or "default"
    if name == "default":
        LOG.warning("%spre is missing or 'default': the ids may not be those that the model was trained on", KEY)
    return find_pre(name)
