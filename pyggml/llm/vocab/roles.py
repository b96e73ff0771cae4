"""Find the tokens with a role (bos, eos ...) as llama.cpp does: by the file's keys, each kind's defaults, or texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from .tokens import Tokens, TokenType, token_id

# role -> the file's keys for it; the last key that names a token counts
_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "cls": ("cls_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
# When no key names the token of a role, its text does: the first of these texts that is a token (llama.cpp takes the
# one that its hash table has first). Such a token is a control token, whatever the file says.
_TEXTS = {
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# These end generation, whether or not they have a role.
_EOG_TEXTS = (
    *_TEXTS["eot"],
    *("</s>", "<eos>", "[EOS]", "<|eom_id|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>"),
    *("<|tool_response>", "[e~["),
)
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss shows these as text


@dataclass
class Roles:
    """The token of each role, or None."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    cls: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None

    def find(self, kv: Mapping[str, object], tokens: Tokens) -> set[int]:
        """Fill in the roles that the file names; the values so far are the defaults. Corrects the types of tokens that
        are known by their texts, and returns the ids of tokens that end generation."""
        for role in fields(self):
            for key in _KEYS[role.name]:
                setattr(self, role.name, token_id(kv, key, len(tokens.texts), getattr(self, role.name)))
        for role, texts in _TEXTS.items():
            found = [tokens.ids[text] for text in texts if text in tokens.ids]
            if getattr(self, role) is None and found:
                setattr(self, role, found[0])
                tokens.types[found[0]] = TokenType.CONTROL
        ends = {i for i in (self.fim_pad, self.fim_rep, self.fim_sep, self.eos, self.eot, self.eom) if i is not None}
        for text in _EOG_TEXTS:
            if text in tokens.ids:
                ends.add(tokens.ids[text])
                tokens.types[tokens.ids[text]] = TokenType.CONTROL
        for text in _SHOWN:
            if text in tokens.ids:
                tokens.types[tokens.ids[text]] = TokenType.USER_DEFINED
        _drop_false_ends(tokens, ends)
        return ends


def _drop_false_ends(tokens: Tokens, ends: set[int]) -> None:
    """Take from `ends` the tokens that do not end generation in a few vocabularies, known by other tokens they have."""
    texts = {tokens.texts[i] for i in ends}
    calls = not texts.isdisjoint(("<|call|>", "<|calls|>"))
    if calls and not texts.isdisjoint(("<|return|>", "<|flush|>")) and "<|end|>" in texts:
        ends.remove(tokens.ids["<|end|>"])
        tokens.types[tokens.ids["<|end|>"]] = TokenType.USER_DEFINED
    if not texts.isdisjoint(("<|tool_response>", "<|plamo:eos|>")) and "</s>" in texts:
        ends.remove(tokens.ids["</s>"])
        tokens.types[tokens.ids["</s>"]] = TokenType.NORMAL
