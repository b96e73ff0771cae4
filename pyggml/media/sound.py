"""Sound: read from a file or from samples, and turned into the log-mel features that Whisper's encoders read.

The features are those of the transformers library's `WhisperFeatureExtractor` (its NumPy way, bit for bit): the power
of each frequency in overlapping windows, summed up by filters on Slaney's mel scale, and the logarithm of the sums.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pyggml import limits
from pyggml.errors import MediaError, whole
from pyggml.small_file import open_regular

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Sound: TypeAlias = "str | os.PathLike[str] | bytes | npt.ArrayLike"

RATE = 16000  # samples in a second, as all towers here read them
_RATES = (1000, 768000)
_CHANNELS = 64
_BLOCK = 1 << 16  # samples that are read at a time
_FRAMES = 2048  # frames whose frequencies are computed at a time
_LEAST_POWER, _RANGE = 1e-10, 8.0  # of the mel sums; how far below the largest logarithm others may be


# -- reading -----------------------------------------------------------------------------------------------------------


def read_sound(sound: Sound, rate: int | None = None) -> Floats:
    """The samples of a sound: float32 [n_samples], one channel, 16,000 in a second.

    sound  a path or the bytes of a file (wav, flac, mp3, ogg ...), or samples: an array [n_samples] or
           [n_samples, n_channels] of floats in -1 .. 1 or of integers, which are divided by what their type can hold
    rate   how many samples make a second, for an array; a file says it itself

    Channels are averaged. Another rate is converted by the library soxr. Files need `pip install pyggml[media]`.
    Raises MediaError for a file that is missing or damaged, for a sound that is empty, longer than
    `limits.SOUND_SECONDS` or `limits.SOUND_SAMPLES`, or not finite, for an array without a rate or of another shape,
    and when a library is missing.
    """
    if isinstance(sound, (str, os.PathLike, bytes, bytearray, memoryview)):
        if rate is not None:
            raise MediaError(f"rate = {rate!r:.30} is of samples: a file says its own")
        return _of_file(cast("str | os.PathLike[str] | bytes", sound))
    samples = _of_array(sound)
    if rate is None:
        raise MediaError("samples need a rate: how many of them make a second (rate=16000)")
    if not _RATES[0] <= whole("rate", rate, error=MediaError) <= _RATES[1]:
        raise MediaError(f"rate must be {_RATES[0]} to {_RATES[1]} samples a second, not {rate}")
    return _converted("the sound", (samples[i : i + _BLOCK] for i in range(0, len(samples), _BLOCK)), rate)


def _converted(what: str, blocks: Iterable[Floats], rate: int) -> Floats:
    """All samples of a sound, which comes in blocks, at `RATE`. No more is held of another rate than a block: a second
    of it, which is a few bytes of a FLAC file, may have as many samples as 48 of ours."""
    n, found = 0, list[Floats]()
    stream = None if rate == RATE else _resampler(rate)
    for block in blocks:
        n += len(block)
        if n / rate > limits.SOUND_SECONDS:
            raise MediaError(f"{what} is {n / rate:.0f} seconds long: up to {limits.SOUND_SECONDS} are supported")
        if not np.isfinite(block).all():
            raise MediaError(f"{what} has samples that are NaN or infinite")
        found.append(block if stream is None else stream(block, False))
    if not n:
        raise MediaError(f"{what} is empty: it has no samples")
    if stream is not None:
        found.append(stream(np.empty(0, np.float32), True))
    samples = np.concatenate(found)
    if not samples.size:
        raise MediaError(f"{what} is empty: it is shorter than a sample at {RATE} Hz")
    if stream is not None and not np.isfinite(samples).all():
        raise MediaError(f"{what} has samples that are too large to be converted to {RATE} Hz")
    return samples


def _of_array(sound: npt.ArrayLike) -> Floats:
    try:
        a = np.asarray(sound)
    except (TypeError, ValueError) as e:
        raise MediaError(f"a sound is a path, bytes, or an array of samples, not {sound!r:.60}: {e}") from None
    if a.ndim not in (1, 2) or a.dtype.kind not in "fiu":
        raise MediaError(
            f"samples are an array [n_samples] or [n_samples, n_channels] of numbers, not {a.dtype} {a.shape}"
        )
    if a.ndim == 2 and not 0 < a.shape[1] <= _CHANNELS:
        raise MediaError(f"samples of shape {a.shape} would have {a.shape[1]} channels: 1 to {_CHANNELS} are supported")
    if a.dtype.kind == "u":
        a = (a.astype(np.float64) - (half := 2.0 ** (8 * a.dtype.itemsize - 1))) / half
    elif a.dtype.kind == "i":
        a = a.astype(np.float64) / 2.0 ** (8 * a.dtype.itemsize - 1)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        mono = a if a.ndim == 1 else a.mean(1, dtype=np.float64)
        return np.ascontiguousarray(mono, np.float32)


def _of_file(sound: str | os.PathLike[str] | bytes) -> Floats:
    """The averaged samples of a file at `RATE`."""
    try:
        import soundfile  # imported late: few programs need it
    except (ImportError, OSError) as e:
        raise MediaError(f"reading sound files needs the library soundfile (pip install pyggml[media]): {e}") from None
    held = isinstance(sound, (bytes, bytearray, memoryview))
    what = f"the sound of {len(sound)} bytes" if held else os.fspath(cast("str", sound))
    if not held and not os.path.isfile(cast("str", sound)):
        raise MediaError(f"{what}: there is no such file")
    library: Any = soundfile
    try:
        stored = io.BytesIO(sound) if held else open_regular(cast("str", sound), MediaError)
        with stored, library.SoundFile(stored) as file:  # by its name the library would read other files beside it
            rate = int(file.samplerate)
            if not _RATES[0] <= rate <= _RATES[1] or not 0 < file.channels <= _CHANNELS:
                raise MediaError(f"{what}: {file.channels} channels of {rate} samples a second are not supported")
            return _converted(what, _averaged(what, file), rate)
    except MediaError:
        raise
    except (library.LibsndfileError, RuntimeError, OSError, ValueError, TypeError) as e:
        raise MediaError(f"{what}: is no sound that can be read: {e}") from None


def _averaged(what: str, file: Any) -> Iterator[Floats]:
    """The samples of an open file, block by block. Each channel costs time, whatever its samples become."""
    n = 0
    while (block := cast("Floats", file.read(_BLOCK, dtype="float32", always_2d=True))).size:
        n += block.size
        if n > limits.SOUND_SAMPLES:
            raise MediaError(f"{what}: has more samples than limits.SOUND_SAMPLES = {limits.SOUND_SAMPLES}")
        yield block.mean(1, dtype=np.float64).astype(np.float32)


def _resampler(rate: int) -> Callable[[Floats, bool], Floats]:
    """A function that takes a sound block by block, and whether that is all, and returns what it is at `RATE`."""
    try:
        import soxr
    except ImportError as e:
        raise MediaError(f"another rate than {RATE} needs the library soxr (pip install pyggml[media]): {e}") from None
    library: Any = soxr
    return library.ResampleStream(rate, RATE, 1, dtype="float32").resample_chunk


# -- features ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoundProcessor:
    """Makes log-mel features as a checkpoint's processor does; made by `sound_processor`.

    n_mels     features of a frame
    n_fft      samples of a window
    hop        samples from one window to the next
    n_samples  samples that one call of the encoder reads (30 seconds)
    """

    n_mels: int
    n_fft: int = 400
    hop: int = 160
    n_samples: int = 480000

    @property
    def n_frames(self) -> int:
        """Frames that one call of the encoder reads."""
        return self.n_samples // self.hop

    def __call__(self, samples: Floats) -> dict[str, Floats]:
        """{"input_features": float32 [1, n_mels, n_frames]} of the first 30 seconds, or of a shorter sound and the
        silence after it."""
        padded = np.zeros(self.n_samples, np.float32)
        padded[: len(samples)] = samples[: self.n_samples]
        return {"input_features": self.frames(padded)[None]}

    def parts(self, samples: Floats) -> Floats:
        """float32 [n, n_mels, n_frames]: all of a sound, and the silence that makes it n times 30 seconds long."""
        n = max(-(-len(samples) // self.n_samples), 1)
        padded = np.zeros(n * self.n_samples, np.float32)
        padded[: len(samples)] = samples
        found: Any = self.frames(padded).reshape(self.n_mels, n, self.n_frames)
        return np.ascontiguousarray(found.swapaxes(0, 1))

    def frames(self, samples: Floats) -> Floats:
        """float32 [n_mels, n_samples // hop]: a frame for each `hop` samples, whose window they are the middle of. At
        the ends the sound is mirrored. Raises MediaError for a sound shorter than half a window."""
        half = self.n_fft // 2
        if len(samples) <= half:
            raise MediaError(f"a sound of {len(samples)} samples is too short for a window of {self.n_fft}")
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, half, mode="reflect"), self.n_fft)
        windows = windows[:: self.hop][: len(samples) // self.hop]
        found = np.empty((self.n_mels, len(windows)), np.float32)
        for i in range(0, len(windows), _FRAMES):
            part: Any = np.fft.rfft(windows[i : i + _FRAMES] * self._window).astype(np.complex64)
            power: Doubles = np.abs(part, dtype=np.float64) ** 2.0
            bands = cast("Doubles", self._filters.T @ power.T)
            found[:, i : i + _FRAMES] = np.log10(np.maximum(_LEAST_POWER, bands))
        if found.size:
            np.maximum(found, found.max() - np.float32(_RANGE), out=found)
        return ((found + np.float32(4.0)) / np.float32(4.0)).astype(np.float32, copy=False)

    @cached_property
    def _window(self) -> Doubles:
        return np.hanning(self.n_fft + 1)[:-1]

    @cached_property
    def _filters(self) -> Doubles:
        return mel_filters(self.n_mels, 1 + self.n_fft // 2)


def mel_filters(n_mels: int, n_freq: int) -> Doubles:
    """float64 [n_freq, n_mels]: how much each of `n_freq` frequencies, which reach from 0 to 8000 Hz evenly, counts for
    each mel. A filter is a triangle between the middles of its neighbours, whose area is the same for all (Slaney's
    Auditory Toolbox): the middles lie evenly on a scale that is linear up to 1000 Hz and logarithmic from there on."""
    top = 15.0 + float(np.log(8.0)) * (27.0 / float(np.log(6.4)))
    mels: Doubles = np.linspace(0.0, top, n_mels + 2)
    edges: Doubles = 200.0 * mels / 3.0
    edges[mels >= 15.0] = 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels[mels >= 15.0] - 15.0))
    widths: Doubles = np.diff(edges)
    slopes: Doubles = edges[None, :] - np.linspace(0, 8000, n_freq)[:, None]
    triangles: Doubles = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))[None, :]


def sound_processor(config: Mapping[str, Any]) -> SoundProcessor:
    """The processor that a `preprocessor_config.json` describes (`WhisperFeatureExtractor`).

    Raises MediaError for another kind of processor, for sizes that make no sense, and for settings that are not
    supported.
    """
    kind = config.get("feature_extractor_type", "WhisperFeatureExtractor")
    if kind != "WhisperFeatureExtractor":
        raise MediaError(f"the feature extractor {kind!r:.60} is not supported, only WhisperFeatureExtractor")
    said: dict[str, int] = {}
    for key, usual, least, most in (
        ("feature_size", 80, 1, 1024),
        ("n_fft", 400, 2, 1 << 14),
        ("hop_length", 160, 1, 1 << 14),
        ("chunk_length", 30, 1, 3600),
        ("sampling_rate", RATE, RATE, RATE),
    ):
        value = config.get(key, usual)
        if type(value) is not int or not least <= value <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise MediaError(f"preprocessor_config.json: {key} must be {wanted}, not {value!r:.60}")
        said[key] = value
    for key in ("dither", "padding_value", "do_normalize"):
        if config.get(key):
            raise MediaError(f"preprocessor_config.json: {key} = {config[key]!r:.60} is not supported")
    n_samples = said["chunk_length"] * RATE
    return SoundProcessor(said["feature_size"], said["n_fft"], said["hop_length"], n_samples)
