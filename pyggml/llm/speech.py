"""The special tokens of a model that writes down speech, and the names of languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import ModelError
from pyggml.types import Ints

if TYPE_CHECKING:
    from .loaded import LoadedModel

_NAMES = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish pl
polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese he hebrew
uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian th thai ur urdu hr
croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak te telugu fa persian lv latvian
bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian mk macedonian br breton eu basque is
icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq albanian sw swahili gl galician mr marathi pa
punjabi si sinhala km khmer sn shona yo yoruba so somali af afrikaans oc occitan ka georgian be belarusian tg tajik sd
sindhi gu gujarati am amharic yi yiddish lo lao uz uzbek fo faroese ht haitian-creole ps pashto tk turkmen nn nynorsk
mt maltese sa sanskrit lb luxembourgish my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian
ln lingala ha hausa ba bashkir jw javanese su sundanese yue cantonese
"""
LANGUAGES = dict(zip(_NAMES.split()[::2], (n.replace("-", " ") for n in _NAMES.split()[1::2]), strict=True))
_CODES = {name: code for code, name in LANGUAGES.items()} | {
    **dict.fromkeys(("moldavian", "moldovan"), "ro"),
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


def language_code(name: str) -> str:
    """`English`, `<|en|>` or `en` -> `en`; other names stay."""
    name = name.lower().strip()
    name = name[2:-2] if name.startswith("<|") and name.endswith("|>") else name
    return _CODES.get(name, name)


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens that tell Whisper what to do, and what its text is not made of.

    start, end     begin and end a text
    languages      code -> token; empty for a model of one language
    tasks          transcribe, translate -> token
    previous       begins the text before; None: there is no such token
    no_speech      its probability after `start` tells that nobody speaks
    no_timestamps  tells that the text has no timestamps, whose tokens follow this one
    max_first      how many steps of 20 milliseconds the first timestamp may be after the window's begin
    never          tokens that are never chosen
    not_first      ... that are not chosen as the first token
    """

    start: int
    end: int
    languages: dict[str, int]
    tasks: dict[str, int]
    previous: int | None
    no_speech: int | None
    no_timestamps: int | None
    max_first: int | None
    never: Ints
    not_first: Ints

    @staticmethod
    def of(model: LoadedModel) -> SpeechTokens:
        """Those of a model: the file's keys for them, or else the tokens of those texts. Raises ModelError when the
        model has no tokenizer, or one without them."""
        texts = model.kv.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list):
            raise ModelError(f"{model.path}: has no tokenizer, so that nothing can be written down")
        ids = {text: i for i, text in enumerate(texts) if text.startswith("<|")}
        r = _Keys(model, ids)
        start = model.decoder_start if f"{model.arch}.decoder_start_token_id" in model.kv else r.token("", _START)
        end = model.vocab.eos
        if start is None or end is None:
            raise ModelError(f"{model.path}: its tokenizer has no tokens that begin and end a text")
        no_timestamps = r.token("no_timestamps_token_id", "<|notimestamps|>")
        if no_timestamps is not None and no_timestamps + 1 >= model.hparams.n_vocab:
            no_timestamps = None  # no timestamps follow it
        no_speech = r.token("", "<|nospeech|>", "<|nocaptions|>")
        if no_speech is None and no_timestamps:
            no_speech = no_timestamps - 1
        codes = r.words("languages")
        tokens = [int(t) for t in r.ints("language_ids")]
        languages = dict(zip(codes, tokens, strict=False)) if codes else {}
        if not languages and "<|transcribe|>" in ids:
            languages = {m[1]: i for text, i in ids.items() if (m := _LANGUAGE.fullmatch(text))}
        if model.kv.get(f"{model.arch}.is_multilingual") is False:
            languages = {}
        tasks = {t: i for t in ("transcribe", "translate") if (i := r.token(f"{t}_token_id", f"<|{t}|>")) is not None}
        if len(tasks) < 2:
            tasks = {}
        previous = r.token("prev_sot_token_id", "<|startofprev|>")
        never = r.ints("suppress_tokens")
        if not len(never):
            special = (start, previous, no_speech, ids.get("<|startoflm|>"), *tasks.values())
            never = np.array(sorted({t for t in special if t is not None}), np.int32)
        max_first: Any = model.kv.get(f"{model.arch}.max_initial_timestamp_index")
        found = SpeechTokens(
            start=start,
            end=end,
            languages=languages if tasks else {},
            tasks=tasks,
            previous=previous,
            no_speech=no_speech,
            no_timestamps=no_timestamps,
            max_first=max_first if type(max_first) is int and max_first >= 0 else None,
            never=never,
            not_first=r.ints("begin_suppress_tokens"),
        )
        every = [*languages.values(), *tasks.values(), *never, *found.not_first, start, end]
        every += [t for t in (previous, no_speech, no_timestamps) if t is not None]
        bad = next((int(t) for t in every if not 0 <= t < model.hparams.n_vocab), None)
        if bad is not None:
            raise ModelError(f"{model.path}: the special token {bad} is none of the {model.hparams.n_vocab} tokens")
        return found


_START = "<|startoftranscript|>"


class _Keys:
    """Keys of a model's metadata, and tokens by their text."""

    def __init__(self, model: LoadedModel, ids: dict[str, int]) -> None:
        self._model, self._ids = model, ids

    def token(self, key: str, *texts: str) -> int | None:
        found = self._model.kv.get(f"{self._model.arch}.{key}") if key else None
        if type(found) is int:
            return found
        return next((self._ids[text] for text in texts if text in self._ids), None)

    def ints(self, key: str) -> Ints:
        found: Any = self._model.kv.get(f"{self._model.arch}.{key}")
        return np.asarray([] if found is None else found, np.int32).reshape(-1)

    def words(self, key: str) -> list[str]:
        found = self._model.kv.get(f"{self._model.arch}.{key}")
        return found.split() if isinstance(found, str) else []
