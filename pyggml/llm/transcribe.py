"""Whisper writes down what is said: windows of 30 seconds, the rules of its timestamps, and another try when a window
fails (arXiv 2212.04356, 3.8 and 4.5).

Tokens are those of the transformers library's `generate` (greedy, one sound, `return_timestamps=True`). As in OpenAI's
code, a window that has nothing of the sound is not decoded, and the text before a doubtful window is forgotten.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, OptionError, one_of
from pyggml.media.sound import RATE, Sound, SoundProcessor
from pyggml.types import Floats

from .batch import Batch
from .context import LlamaContext
from .sound import heard, hearing
from .speech import SpeechTokens, language_code

if TYPE_CHECKING:
    from .loaded import LoadedModel
    from .options import ContextOptions

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_FORGETS = 0.5  # the text of a window sampled at this temperature or above is no prompt for the next
_STRIDE = 2  # frames that become one moment of the encoder, and one step of timestamps
Doubles = npt.NDArray[np.float64]
Task = Literal["transcribe", "translate"]


@dataclass(frozen=True)
class Segment:
    """What is said from one timestamp to the next.

    start, end         seconds
    text               without timestamps and other special tokens
    tokens             all token ids, timestamps too
    temperature        at which the window was sampled (0: the likeliest tokens)
    avg_logprob        the mean log-probability of the window's tokens
    compression_ratio  how much the window's text shrinks when packed: much, when it repeats itself
    no_speech_prob     how likely nobody speaks in the window
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Transcription:
    """What was said: `text`, the `segments` it consists of, its `language` (`en`; empty for a model of one language),
    and the sound's `duration` in seconds."""

    text: str
    segments: list[Segment]
    language: str
    duration: float

    def srt(self) -> str:
        """As subtitles (SubRip)."""
        return "".join(srt_of(i, s) for i, s in enumerate(_shown(self.segments), 1))

    def vtt(self) -> str:
        """As subtitles (WebVTT)."""
        return "WEBVTT\n\n" + "".join(vtt_of(i, s) for i, s in enumerate(_shown(self.segments), 1))

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def _shown(segments: Sequence[Segment]) -> list[Segment]:
    return [s for s in segments if s.text.strip()]


def srt_of(i: int, s: Segment) -> str:
    """Segment number `i` (from 1 on) as a subtitle of SubRip."""
    return f"{i}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n\n"


def vtt_of(i: int, s: Segment) -> str:
    """Segment number `i` (from 1 on) as a subtitle of WebVTT."""
    return f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{s.text.strip()}\n\n"


def _clock(seconds: float, point: str) -> str:
    """12.5 -> 00:00:12.500, or with another decimal point."""
    ms = round(seconds * 1000)
    return f"{ms // 3600000:02d}:{ms // 60000 % 60:02d}:{ms // 1000 % 60:02d}{point}{ms % 1000:03d}"


class _Written(NamedTuple):
    """What one try of a window gave. `tokens` are without the end of the text."""

    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcriber:
    """Writes down a sound window by window. Made by `transcribe`, whose arguments it takes."""

    def __init__(
        self,
        model: LoadedModel,
        sound: Sound,
        rate: int | None = None,
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str | Sequence[int] | None = None,
        timestamps: bool = True,
        temperature: float | Sequence[float] = TEMPERATURES,
        compression_ratio_threshold: float | None = 2.4,
        logprob_threshold: float | None = -1.0,
        no_speech_threshold: float | None = 0.6,
        condition_on_previous_text: bool = True,
        seed: int = 0,
        context: ContextOptions | None = None,
    ) -> None:
        if model.arch != "whisper":
            raise ModelError(f"{model.arch} does not transcribe: whisper does")
        self._model, self._special = model, SpeechTokens.of(model)
        one_of("task", task, ("transcribe", "translate"), OptionError)
        self._temperatures = _temperatures(temperature)
        self._most_packed, self._least_logprob = compression_ratio_threshold, logprob_threshold
        self._silence, self._conditions = no_speech_threshold, condition_on_previous_text
        self._timestamps, self._rng = timestamps, np.random.default_rng(seed)
        self._task: Task = task
        self._language = None if language is None else self._known_language(language)
        if task == "translate" and not self._special.languages:
            raise ModelError(f"{model.path}: knows one language and does not translate")
        if timestamps and self._special.no_timestamps is None:
            raise ModelError(f"{model.path}: has no token <|notimestamps|>: timestamps=False transcribes without them")
        self._before: list[int] = []
        if prompt is not None:
            self._before = model.tokenize(" " + prompt.strip(), False) if isinstance(prompt, str) else list(prompt)
        self._hearing = hearing(model)
        samples = heard(sound, rate)
        self.duration = len(samples) / RATE
        self._frames, self._n_own = _frames_of(self._hearing.processor, samples)
        self._context = context
        self._n_window = self._hearing.processor.n_frames
        self._per_frame = self._hearing.processor.hop / RATE

    @property
    def language(self) -> str:
        """The code of the language that is spoken, known from the first segment on."""
        return self._language or ""

    def segments(self) -> Iterator[Segment]:
        """The segments, as soon as their window is written down."""
        n_ctx = self._model.hparams.n_ctx_train
        options: dict[str, Any] = {"n_batch": n_ctx, **(self._context or {})}
        n_threads = options.get("n_threads")
        with LlamaContext(self._model, n_ctx, **options) as ctx:
            seek = 0
            while seek < self._n_own:
                self._listen(ctx, seek, n_threads)
                start = self._start(ctx)
                written = self._write(ctx, start)
                n = min(self._frames.shape[1] - seek, self._n_window)
                if written is None:
                    seek += n
                    continue
                found, moved = self._cut(written, seek, min(n, max(self._n_own - seek, 1)))
                self._remember(written, [s.tokens for s in found])
                yield from found
                seek += moved if moved > 0 else n

    # -- a window ------------------------------------------------------------------------------------------------------

    def _listen(self, ctx: LlamaContext, seek: int, n_threads: int | None) -> None:
        """Let the decoder attend to the window that begins with frame `seek`."""
        window = np.zeros((1, len(self._frames), self._n_window), np.float32)
        own = self._frames[:, seek : seek + self._n_window]
        window[0, :, : own.shape[1]] = own
        rows = self._hearing.tower.encode({"input_features": window}, n_threads).features.rows
        batch = Batch()
        for i, row in enumerate(rows):
            batch.add_embd(row, i)
        ctx.encode(batch)

    def _start(self, ctx: LlamaContext) -> list[int]:
        """The tokens that the text begins with: language (which is detected once), task, and whether it has
        timestamps."""
        special = self._special
        start = [special.start]
        if special.languages:
            if self._language is None:
                self._language = self._detected(ctx)
            start.append(special.languages[self._language])
            if special.tasks:
                start.append(special.tasks[self._task])
        if not self._timestamps and special.no_timestamps is not None:
            start.append(special.no_timestamps)
        return start

    def _detected(self, ctx: LlamaContext) -> str:
        """The language whose token is the likeliest after the start."""
        logits = self._decoded(ctx, [self._special.start], 0, [0])[0]
        languages = self._special.languages
        return max(languages, key=lambda code: float(logits[languages[code]]))

    def _decoded(self, ctx: LlamaContext, tokens: Sequence[int], pos: int, wanted: Sequence[int]) -> Floats:
        """Logits [n, n_vocab] of the tokens `wanted` among those from position `pos` on, which replace what was
        there."""
        ctx.memory.seq_rm(0, pos, ctx.n_ctx)
        batch = Batch()
        for i, token in enumerate(tokens):
            batch.add(token, pos + i, 0, logits=i in wanted)
        ctx.decode(batch)
        return np.array(ctx.logits)

    def _write(self, ctx: LlamaContext, start: list[int]) -> _Written | None:
        """The text of the window, with the first temperature that gives a text without doubts, or with the last. None
        when nobody speaks."""
        written = None
        for temperature in self._temperatures:
            written = self._try(ctx, start, temperature)
            doubtful = self._least_logprob is not None and written.avg_logprob < self._least_logprob
            if doubtful and self._silence is not None and written.no_speech_prob > self._silence:
                return None
            packed = self._most_packed is not None and written.compression_ratio > self._most_packed
            if not doubtful and not packed:
                break
        return written

    def _try(self, ctx: LlamaContext, start: list[int], temperature: float) -> _Written:
        special, n_most = self._special, self._model.hparams.n_ctx_train
        prompt = [*self._prompt(), *start]
        at = len(prompt) - len(start)
        wanted = sorted({at, len(prompt) - 1})
        rows = self._decoded(ctx, prompt, 0, wanted)
        silence = 0.0 if special.no_speech is None else float(_softmax(rows[0])[special.no_speech])
        tokens: list[int] = []
        logits, total = rows[-1], 0.0
        while True:
            scores = self._allowed(logits.astype(np.float64), tokens)
            logprobs = scores - _log_sum(scores)
            token = int(scores.argmax()) if not temperature else self._sampled(scores / temperature)
            total += float(logprobs[token])
            tokens.append(token)
            if token == special.end or len(prompt) + len(tokens) >= n_most:
                break
            logits = self._decoded(ctx, [token], len(prompt) + len(tokens) - 1, [0])[0]
        mean = total / len(tokens)
        if tokens[-1] == special.end:
            tokens.pop()
        text = self._text(tokens).encode()
        packed = len(text) / len(zlib.compress(text)) if text else 0.0
        return _Written(tokens, temperature, mean, packed, silence)

    def _prompt(self) -> list[int]:
        """What was said before, as the decoder reads it: at most half of its context."""
        most = self._model.hparams.n_ctx_train // 2 - 1
        if not self._before or self._special.previous is None or most < 1:
            return []
        return [self._special.previous, *self._before[-most:]]

    def _sampled(self, scores: Doubles) -> int:
        p: Doubles = np.cumsum(_softmax(scores))
        at: Any = np.searchsorted(p, self._rng.random() * cast("float", p[-1]), "right")
        return min(int(at), len(p) - 1)

    def _allowed(self, scores: Doubles, tokens: Sequence[int]) -> Doubles:
        """The logits of the next token, -inf where the rules forbid it."""
        special, first = self._special, self._special.no_timestamps
        if not tokens:
            scores[special.not_first] = -np.inf
        scores[special.never] = -np.inf
        if not self._timestamps or first is None:
            return scores
        scores[first] = -np.inf
        first += 1  # timestamps begin here, and are the last tokens of the vocabulary
        stamped = [t >= first for t in tokens[-2:]]
        if stamped and stamped[-1]:
            if len(stamped) < 2 or stamped[0]:
                scores[first:] = -np.inf  # text follows a pair, and the first
            else:
                scores[: special.end] = -np.inf  # a pair, or the end
        last = next((t for t in reversed(tokens) if t >= first), None)
        if last is not None:  # they never go back; only the second of a pair may be the same
            pairs = stamped == [False, True]
            scores[first : last if pairs else last + 1] = -np.inf
        if not tokens:
            scores[:first] = -np.inf
            if special.max_first is not None:
                scores[first + special.max_first + 1 :] = -np.inf
        if _log_sum(scores[first:]) > scores[:first].max():  # together likelier than any other
            scores[:first] = -np.inf
        return scores

    # -- segments ------------------------------------------------------------------------------------------------------

    def _cut(self, w: _Written, seek: int, n_frames: int) -> tuple[list[Segment], int]:
        """The segments of a window that begins with frame `seek` and has `n_frames` frames of the sound, and how many
        frames later the next window begins.

        Two timestamps side by side end one segment and begin the next. What follows the last such pair is cut off in
        the middle, and the next window begins there, unless one timestamp ends the text: then nobody speaks after it.
        """
        first, tokens, moment = self._first_timestamp, w.tokens, _STRIDE * self._per_frame
        begins, stamped = seek * self._per_frame, [t >= first for t in w.tokens]
        ends = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
        if not ends:
            last = n_frames // _STRIDE
            stamps = [t for t in tokens if t >= first]
            if stamps and stamps[-1] != first:
                last = stamps[-1] - first
            return [self._segment(w, begins, begins + last * moment, tokens)], self._n_window
        alone = stamped[-2:] == [False, True]
        if alone:
            ends.append(len(tokens))
        else:
            ends[-1] += 1  # with both timestamps: the pair tells that the segment is whole
        found: list[Segment] = []
        start = 0
        for end in ends:
            part = tokens[start:end]
            last = part[-1 if alone or end != ends[-1] else -2]
            found.append(self._segment(w, begins + (part[0] - first) * moment, begins + (last - first) * moment, part))
            start = end
        return found, self._n_window if alone else (tokens[start - 2] - first) * _STRIDE

    @property
    def _first_timestamp(self) -> int:
        no = self._special.no_timestamps
        return self._model.hparams.n_vocab if no is None or not self._timestamps else no + 1

    def _segment(self, w: _Written, start: float, end: float, tokens: list[int]) -> Segment:
        return Segment(
            start, end, self._text(tokens), tokens, w.temperature, w.avg_logprob, w.compression_ratio, w.no_speech_prob
        )

    def _text(self, tokens: Sequence[int]) -> str:
        first, vocab = self._first_timestamp, self._model.vocab
        return self._model.detokenize([t for t in tokens if t < first and not vocab.is_control(t)])

    def _remember(self, w: _Written, segments: Sequence[list[int]]) -> None:
        """Keep the text as the beginning of the next window's prompt."""
        if not self._conditions or w.temperature >= _FORGETS:
            self._before = []
            return
        first = self._first_timestamp
        for tokens in segments:
            whole = len(tokens) > 2 and tokens[-2] >= first
            self._before += tokens[:-1] if whole else tokens

    def _known_language(self, name: str) -> str:
        languages = self._special.languages
        if not languages:
            if language_code(name) == "en":
                return "en"
            raise ModelError(f"{self._model.path}: knows one language: language={name!r} cannot be chosen")
        code = language_code(name)
        one_of("language", code, tuple(languages), OptionError)
        return code


def _temperatures(given: float | Sequence[float]) -> tuple[float, ...]:
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    if not values or not all(isinstance(t, (int, float)) and 0 <= t <= 100 for t in values):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"temperature must be one number from 0 to 100, or several, not {given!r:.60}")
    return tuple(map(float, values))


def _frames_of(p: SoundProcessor, samples: Floats) -> tuple[Floats, int]:
    """All frames, and how many of them have something of the sound; those of a short sound have 30 seconds."""
    if len(samples) <= p.n_samples:
        return p(samples)["input_features"][0], -(-len(samples) // p.hop)
    frames = p.frames(samples)
    return frames, frames.shape[1]


def _log_sum(scores: Doubles) -> float:
    top = scores.max()
    return float(top + np.log(np.exp(scores - top).sum())) if np.isfinite(top) else -np.inf


def _softmax(scores: npt.NDArray[Any]) -> Doubles:
    e = np.exp(scores.astype(np.float64) - scores.max())
    return e / e.sum()


def transcribe(self: LoadedModel, sound: Sound, rate: int | None = None, **options: Any) -> Transcription:
    """Write down what is said in a sound (Whisper):

        print(model.transcribe("talk.wav").text)

    sound, rate                  as of `encode_audio`; sounds of any length
    language                     `en`, `english` ...; None: it is detected in the first 30 seconds
    task                         "transcribe", or "translate" into English
    prompt                       text (or token ids) that comes before, which names and style are taken from
    timestamps                   whether segments have times; without, each is a window of 30 seconds
    temperature                  0: the likeliest tokens. Of several, the next one is tried when a text is doubtful
    compression_ratio_threshold  a text is doubtful that shrinks more than so when it is packed (None: never)
    logprob_threshold            ... whose mean log-probability is smaller (None: never)
    no_speech_threshold          nobody speaks when a text is doubtful so, and this is less likely (None: never)
    condition_on_previous_text   the text of a window is the prompt of the next
    seed                         of what is sampled
    context                      further arguments for the `LlamaContext`

    Raises ModelError for another model and one without a tokenizer, MediaError for a sound that cannot be read,
    OptionError for bad options.
    """
    t = Transcriber(self, sound, rate, **options)
    segments = list(t.segments())
    return Transcription("".join(s.text for s in segments), segments, t.language, t.duration)
