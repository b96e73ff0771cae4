"""The vocabulary of a GGUF model: text to token ids and back, with llama.cpp's exact ids.

This file does what all kinds of tokenizers share: it cuts special tokens out of a text, puts the frame (bos, eos ...)
around it, and makes text of tokens. Each kind has a file in `kinds/` for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pyggml.errors import ModelError, whole

from .forms import Form, form_of, normalize
from .kinds import Kind, Tokenizer, kind_of, make_tokenizer
from .kinds.spm import SPM
from .roles import Roles
from .special import SPACES, SpecialTokens
from .tokens import KEY, Tokens, TokenType, flag, token_ids, utf8

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_SPACE_BEFORE = re.compile(rb" (?=[?!.,])", re.DOTALL)
_APOSTROPHE = re.compile(rb" ' ", re.DOTALL)
_CONTRACTION = re.compile(rb" (?='(?:[sm]|re|ve))", re.DOTALL)


class Vocab:
    """Tokens and their ids; made by `Vocab.from_gguf`.

    `bos eos eot eom unk nl sep pad mask cls fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep` are the ids of roles, or
    None. `eog` has the ids that end a text. `add_bos add_eos add_sep add_space_prefix clean_spaces` are as in
    llama.cpp. `kind` is `tokenizer.ggml.model`. `suppressed` has the ids that are never sampled
    (`tokenizer.ggml.suppress_tokens`). `before` and `after` are the tokens that `add_special` puts around a text.
    `lstrip` and `rstrip` have the tokens that swallow the white space before or after them. `form` is Unicode's
    normalization form that texts are brought into, or None.
    """

    def __init__(self, model: str, kind: Kind, tokens: Tokens, kv: Mapping[str, object]) -> None:
        self.kind, self._plain = model, kind.plain
        self._tokens = tokens
        roles = kind.roles
        n = len(tokens.texts)
        kind.add_space_prefix = flag(kv, "add_space_prefix", kind.add_space_prefix)
        before = list(tokens.types)  # tokenizers go by the file's types, not by those that the roles correct
        self.eog = roles.find(kv, tokens)
        types, tokens.types = tokens.types, before
        self._tokenizer: Tokenizer = make_tokenizer(model, kind, tokens, roles, kv)
        tokens.types = types
        self.bos, self.eos, self.eot, self.eom, self.unk = roles.bos, roles.eos, roles.eot, roles.eom, roles.unk
        self.sep, self.pad, self.mask = roles.sep, roles.pad, roles.mask
        self.cls = roles.bos if roles.cls is None else roles.cls
        self.fim_pre, self.fim_suf, self.fim_mid = roles.fim_pre, roles.fim_suf, roles.fim_mid
        self.fim_pad, self.fim_rep, self.fim_sep = roles.fim_pad, roles.fim_rep, roles.fim_sep
        always_bos = kind.pre is not None and kind.pre.always_bos
        self.add_bos = (always_bos or flag(kv, "add_bos_token", kind.add_bos)) and self.bos is not None
        self.add_eos = flag(kv, "add_eos_token", kind.add_eos) and self.eos is not None
        self.add_sep = flag(kv, "add_sep_token", kind.add_sep) and self.sep is not None
        self.add_space_prefix, self.clean_spaces = kind.add_space_prefix, kind.clean_spaces
        self.suppressed = token_ids(kv, "suppress_tokens", n)
        self.before, self.after = self._frame(kind)
        self.form: Form | None = form_of(kv)
        self._pieces: list[bytes | None] = [None] * n
        for token in tokens.of_type(TokenType.BYTE):
            self.token_to_piece(token)  # raises for a byte token that spells no byte
        self.lstrip, self.rstrip, spaces = self._find_strips(kv)
        self._special = self._find_special(spaces)

    @staticmethod
    def from_gguf(kv: Mapping[str, object]) -> Vocab:
        """The vocabulary in a GGUF's metadata. Raises ModelError when it is missing, malformed or not known."""
        model = kv.get(f"{KEY}model")
        if not isinstance(model, str):
            raise ModelError(f"the file has no vocabulary: {KEY}model is missing")
        if model in ("none", "no_vocab"):
            n = kv.get(f"{kv.get('general.architecture')}.vocab_size", 0)
            return NoVocab(n if isinstance(n, int) else 0)
        return Vocab(model, kind_of(model, kv), Tokens.from_gguf(kv), kv)

    @property
    def n_tokens(self) -> int:
        return len(self._tokens.texts)

    @property
    def nl(self) -> int | None:
        """The token of a newline; when there is none, the padding token."""
        if isinstance(self._tokenizer, SPM):
            ids = [i for i in (self._tokenizer.byte_ids[10],) if i is not None]
        else:
            ids = [] if self.kind == "bert" else self.tokenize("\n", add_special=False)
        return ids[0] if ids else self.pad

    def text(self, token: int) -> str:
        """The vocabulary's spelling of a token: U+2581 or U+0120 for a space, surrogates for bytes beside UTF-8."""
        return self._tokens.texts[self._checked(token)]

    def type_of(self, token: int) -> TokenType:
        """The token's type: the file's, except for tokens that are known by their texts."""
        return TokenType(self._tokens.types[self._checked(token)])

    def is_control(self, token: int) -> bool:
        return self._tokens.types[self._checked(token)] == TokenType.CONTROL

    def is_byte(self, token: int) -> bool:
        return self._tokens.types[self._checked(token)] == TokenType.BYTE

    def is_eog(self, token: int) -> bool:
        """Whether the token ends generation: eos, eot, eom, or a token that is known by its text to do so."""
        return self._checked(token) in self.eog

    def tokenize(
        self, text: str | bytes, add_special: bool = True, parse_special: bool = False, continued: bool = False
    ) -> list[int]:
        """Ids of `text`. `add_special` adds the tokens that the model wants around a text (bos, eos; cls and sep).
        `parse_special` reads the texts of control tokens as these tokens (of user-defined tokens it always does).
        `continued` says that the text follows other text, so that no space is put before it. Lone surrogates are read
        as U+FFFD. Vocabularies that have a token for each byte keep bytes that are not UTF-8.
        Raises ModelError when the vocabulary has neither a token for a character nor an unknown token."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        elif isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        else:
            raise ModelError(f"text cannot be {text!r:.60}")
        out = self.before.copy() if add_special else []
        prefix = " " if self.add_space_prefix and isinstance(self._tokenizer, SPM) else ""
        after_special = not continued
        for part in self._special.split(text, parse_special):
            if isinstance(part, int):
                out.append(part)
            else:
                part = part if self.form is None else normalize(self.form, part)
                out += self._tokenizer.encode(prefix + part if after_special else part)
            after_special = isinstance(part, int)
        return out + self.after if add_special else out

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token, which may be a part of a UTF-8 character. Control and unknown tokens are empty unless
        `special`. Raises ModelError for an id outside the vocabulary."""
        i = self._checked(token)
        if not special and self._tokens.types[i] in _HIDDEN:
            return b""
        piece = self._pieces[i]
        if piece is None:
            piece = self._pieces[i] = self._piece(i)
        return piece

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD. As in llama.cpp, the space prefix is dropped only from
        the first id, not from an id after a bos. `remove_special` drops the bos and eos that tokenize added;
        `unparse_special` shows control tokens by their text. Raises ModelError for an id outside the vocabulary."""
        if not isinstance(ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"token ids cannot be {ids!r:.60}")
        tokens = [self._checked(t) for t in ids]
        strip = self.add_space_prefix
        if remove_special and self.add_bos and tokens[:1] == [self.bos]:
            del tokens[0]
            strip = False
        if remove_special and self.add_eos and tokens[-1:] == [self.eos]:
            del tokens[-1]
        pieces = [self.token_to_piece(t, unparse_special) for t in tokens]
        if strip and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        data = b"".join(pieces)
        if self.clean_spaces:
            for pattern, repl in ((_SPACE_BEFORE, b""), (_APOSTROPHE, b"'"), (_CONTRACTION, b"")):
                data = pattern.sub(repl, data)
        return data.decode("utf-8", "replace")

    def infill_ids(self, prefix: str, suffix: str) -> list[int]:
        """Ids of a prompt for the text between two others: bos, the token fim_pre and the prefix, fim_suf and the
        suffix, and last fim_mid. Raises ModelError when the vocabulary lacks these tokens."""
        roles = {"fim_pre": self.fim_pre, "fim_suf": self.fim_suf, "fim_mid": self.fim_mid}
        missing = [name for name, token in roles.items() if token is None]
        if missing:
            raise ModelError(f"the vocabulary has no token for {', '.join(missing)}: the model cannot fill in text")
        pre, suf, mid = (token for token in roles.values() if token is not None)
        before, behind = (self.tokenize(text, add_special=False) for text in (prefix, suffix))
        return [*self.before, pre, *before, suf, *behind, mid]

    def pair(self, first: str, second: str) -> list[int]:
        """Ids of two texts as a reranker reads them: each with its frame, and sep between them when the vocabulary asks
        for it."""
        middle = [self.sep] if self.add_sep and self.sep is not None and self.after != [self.sep] else []
        head, tail = (self.tokenize(text, add_special=False) for text in (first, second))
        return [*self.before, *head, *self.after, *middle, *tail, *self.after]

    def _checked(self, token: int) -> int:
        i = whole("a token", token, error=ModelError)
        if not 0 <= i < self.n_tokens:
            raise ModelError(f"token {i} is not in the vocabulary of {self.n_tokens}")
        return i

    def _frame(self, kind: Kind) -> tuple[list[int], list[int]]:
        if kind.frame == "none":
            return [], []
        if kind.frame == "cls":
            ends = (self.bos, self.sep)
        else:
            ends = (self.bos if self.add_bos else None, self.eos if self.add_eos else None)
        before, after = ([] if token is None else [token] for token in ends)
        return before, after

    def _piece(self, token: int) -> bytes:
        kind = self._tokens.types[token]
        if kind == TokenType.BYTE:
            return self._tokens.byte(token)
        if kind == TokenType.NORMAL or self._plain:
            return self._tokenizer.piece(token)
        return b"" if kind in (TokenType.UNUSED, TokenType.UNDEFINED) else utf8(self._tokens.texts[token])

    def _find_special(self, spaces: str) -> SpecialTokens:
        texts = self._tokens.texts
        always = [(texts[i], i) for i in self._tokens.of_type(TokenType.USER_DEFINED)]
        parsed = [(texts[i], i) for i in self._tokens.of_type(*_HIDDEN)]
        return SpecialTokens(always, parsed, self.lstrip, self.rstrip, spaces)

    def _find_strips(self, kv: Mapping[str, object]) -> tuple[set[int], set[int], str]:
        """The tokens that swallow what is before them, or after them: ASCII's white space, and the given characters."""
        said = tuple(token_ids(kv, f"{side}strip_tokens", len(self._tokens.texts)) for side in "lr")
        if any(said):
            return set(said[0]), set(said[1]), SPACES
        ids = self._tokens.ids
        # Other programs' files do not say which tokens swallow white space: llama.cpp goes by names.
        name, arch, pre = (str(kv.get(key, "")) for key in ("general.name", "general.architecture", f"{KEY}pre"))
        lstrip, rstrip = set[int](), set[int]()
        names = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
        if any(n in pre for n in names) or arch in ("nomic-bert-moe", "jina-bert-v3"):
            lstrip = {ids[text] for text in ("<mask>",) if text in ids}
        elif any(n in name.lower() for n in ("phi-3", "phi3")):
            swallow = set(self._tokens.of_type(TokenType.USER_DEFINED, *_HIDDEN))
            swallow |= {ids[text] for text in ("</s>",) if text in ids}
            rstrip = swallow - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        elif "modern-bert" in name.lower():
            lstrip = {ids[text] for text in ("[MASK]",) if text in ids}
        return lstrip, rstrip, ""


class NoVocab(Vocab):
    """Stands for the vocabulary of a model that has none, and reads and makes ids only."""

    def __init__(self, n_tokens: int) -> None:
        none: dict[str, object] = {f"{KEY}add_bos_token": False, f"{KEY}add_eos_token": False}
        super().__init__("rwkv", Kind(Roles(), frame="none"), Tokens([], [], [], {}), none)
        self.kind, self._n = "none", max(n_tokens, 0)

    @property
    def n_tokens(self) -> int:
        return self._n

    def text(self, token: int) -> str:
        self._checked(token)
        return ""

    def is_control(self, token: int) -> bool:
        return bool(self.text(token))

    def is_byte(self, token: int) -> bool:
        return bool(self.text(token))

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        self._checked(token)
        return b""

    def tokenize(
        self, text: str | bytes, add_special: bool = True, parse_special: bool = False, continued: bool = False
    ) -> list[int]:
        raise ModelError("the model has no vocabulary (tokenizer.ggml.model is none): it takes token ids, no text")

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        raise ModelError("the model has no vocabulary (tokenizer.ggml.model is none): its token ids have no text")

    @property
    def nl(self) -> None:
        return None
