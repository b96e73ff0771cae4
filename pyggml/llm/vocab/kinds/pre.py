"""The table of pre-tokenizers (`tokenizer.ggml.pre`). A name decides how a text is cut into words, and some more.

The rules are those of llama.cpp 0.3.36, which differ from the models' originals in places: numbers and white space are
Unicode's; the letters of contractions and of `[a-z]` are ASCII. Possessive `++` and lookbehinds keep searches linear.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.errors import ModelError, nearest

from .split import Rule, ascii_thousands, thousands


@dataclass(frozen=True)
class Pre:
    """A pre-tokenizer.

    rules           for `Splitter`
    ignore_merges   a word that is a token becomes that token, whatever the merges say
    byte_level      tokens are spelled in GPT-2's characters for bytes; if not, in plain text, with `<0x0A>` for bytes
    escape          spaces are spelled U+2581
    clean_spaces    detokenizing drops spaces before punctuation
    add_bos, add_sep, no_bos    defaults; no_bos: there is no default bos
    newlines        a run of newlines that is a token becomes that token
    always_bos      the file cannot switch add_bos off
    """

    rules: tuple[Rule, ...]
    ignore_merges: bool = False
    byte_level: bool = True
    escape: bool = False
    clean_spaces: bool = True
    add_bos: bool = False
    add_sep: bool = False
    no_bos: bool = False
    newlines: bool = False
    always_bos: bool = False


_ANY_CASE = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_TAIL = rf"{_OTHER}[\r\n]*|{_LINES}"
_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?\p{{L}}+| ?\p{{N}}+|{_OTHER}|{_SPACES}"
_LLAMA3 = rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}|{_TAIL}"
_NEWLINES = r"[^\n]+|\n+"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`\{\|\}~][A-Za-z]+"""
_WORD = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_CJK = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_WORD}[\r\n]*|{_LINES}")
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    r"\U0002b820-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
# Letters that have a case, as of the Unicode version of DeepSeek's tokenizer.
_CASED = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _cased(upper: str, lower: str, tail: str) -> str:
    """Words that go from upper to lower case. Letters without a case count as both."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{upper}*{lower}+{tail}|{start}{upper}+{lower}*{tail}"


_UPPER, _LOWER = r"[\p{L}--[a-z]]", r"[\p{L}--[A-Z]]"
_TEKKEN = rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_OTHER}[\r\n/]*|{_LINES}"
_AFTER_WORD = rf"\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_LINES}"
_GPT4O = rf"{_cased(_UPPER, _LOWER, f'(?:{_ANY_CASE})?')}|{_AFTER_WORD}"
_MARKED = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_ANY_CASE})?"
_GRANITE = _cased(r"[[\p{L}\p{M}]--[a-z]]", r"[[\p{L}\p{M}]--[A-Z]]", f"(?:{_ANY_CASE})?") + f"|{_AFTER_WORD}"
_QWEN35 = rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_KIMI = rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--{_HAN}]+(?:{_ANY_CASE})?|\p{{N}}{{1,3}}|{_TAIL}"
_SPACED = r"\p{L}(?:[\p{L}\p{M}]++| \p{L})*+"
_EXAONE_MOE = rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?{_SPACED}|\p{{N}}|{_OTHER}[\r\n/]?|\s*[\r\n]|{_SPACES}"
_JAIS2 = (
    rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s"
)
_AFMOE_CJK = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_CJK = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    r"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+"
)

_DIGIT_GPT2 = (r"\p{N}", _GPT2)
# Names with the same meaning share a row.
_ROWS: dict[str, Pre] = {
    "default": Pre((r"[\p{P}$+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pre(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe": Pre((_LLAMA3,)),
    "chatglm-bpe": Pre((_LLAMA3,), no_bos=True),
    "glm4 glm5": Pre((_LLAMA3,), no_bos=True, ignore_merges=True),
    "minicpm5": Pre((r"\p{N}{1,3}", rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}+|{_TAIL}"), ignore_merges=True),
    "jais-2": Pre((_JAIS2,)),
    "deepseek-llm": Pre(
        (
            r"[\r\n]",
            rf"\s?[{''.join(_CASED)}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            r"(?<!\s)\s++\Z",
            r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        ),
        clean_spaces=False,
    ),
    "deepseek-coder": Pre(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
        clean_spaces=False,
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Pre(_DEEPSEEK3, clean_spaces=False),
    "spark2_5": Pre((r"\p{N}{1,3}", _CJK, rf"{_WORD}|[\r\n]|{_SPACES}", r"\p{N}"), clean_spaces=False),
    "youtu": Pre((_YOUTU_CJK, rf"{_MARKED}|\p{{N}}|{_OTHER}[\r\n/]*|{_LINES}"), ignore_merges=True, clean_spaces=False),
    "falcon": Pre((r"[\p{P}$+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact codeshell exaone minerva-7b mellum2": Pre(_DIGIT_GPT2),
    "command-r smollm": Pre(_DIGIT_GPT2, clean_spaces=False),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4": Pre(
        (_GPT2,)
    ),
    "jina-v1-en jina-v2-code roberta-bpe": Pre((_GPT2,), add_sep=True),
    "trillion granite-docling": Pre((_GPT2,), clean_spaces=False),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2": Pre((_QWEN2,), clean_spaces=False),
    "stablelm2": Pre((_QWEN2,)),
    "qwen35": Pre((_QWEN35,), clean_spaces=False),
    "bloom gpt3-finnish": Pre((_BLOOM,)),
    "poro-chat": Pre((_BLOOM,), clean_spaces=False),
    "viking": Pre((_BLOOM, r"\p{N}"), clean_spaces=False),
    "tekken": Pre((_TEKKEN,), ignore_merges=True, add_bos=True, clean_spaces=False),
    "chameleon": Pre(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`\{-~]",
            _GPT2,
        ),
        add_bos=True,
        clean_spaces=False,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pre((_GPT4O,), clean_spaces=False),
    "granite-embed-multi-97m": Pre((_GRANITE,), ignore_merges=True, clean_spaces=False),
    "tiny_aya cohere2moe": Pre((thousands, rf"{_MARKED}|{_AFTER_WORD}"), clean_spaces=False),
    "kimi-k2": Pre((_KIMI,), clean_spaces=False),
    "superbpe": Pre((r"\p{N}+", ascii_thousands), clean_spaces=False),
    "bailingmoe bailingmoe2 llada-moe": Pre(
        (rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}|{_OTHER}[\r\n]*|\s*[\r\n]|{_SPACES}",), clean_spaces=False
    ),
    "seed-coder": Pre((rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",), clean_spaces=False),
    "ufakzeka": Pre((rf"{_LETTERS}|\p{{N}}|{_TAIL}",), clean_spaces=False),
    "afmoe": Pre((thousands, _AFMOE_CJK, rf"{_WORD}[\r\n]*|{_LINES}"), clean_spaces=False),
    "laguna": Pre((_NEWLINES, _QWEN2), clean_spaces=False),
    "exaone-moe": Pre((_EXAONE_MOE,)),
    "gemma4 granite-embed-multi-311m": Pre((_NEWLINES,), byte_level=False, escape=True, newlines=True, always_bos=True),
    "sarvam-moe": Pre((_NEWLINES,), byte_level=False, escape=True, clean_spaces=False),
    "whitespace": Pre((r"\S+",), byte_level=False),
}
PRE: dict[str, Pre] = {name: pre for names, pre in _ROWS.items() for name in names.split()}


def find_pre(name: str) -> Pre:
    """The pre-tokenizer of this name. Raises ModelError for an unknown name."""
    if name in PRE:
        return PRE[name]
    near = ", ".join(nearest(name, PRE, 5, 0.4)) or ", ".join(sorted(PRE))
    raise ModelError(
        f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); near ones: {near}. "
        "kv_overrides={'tokenizer.ggml.pre': NAME} sets another"
    )
