"""Sound files and samples, and Whisper's features of them against the transformers library's."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml import limits
from pyggml.errors import MediaError
from pyggml.media.sound import RATE, mel_filters, read_sound, sound_processor

from ..conftest import shared_dir

soundfile: Any = pytest.importorskip("soundfile")
soxr: Any = pytest.importorskip("soxr")
MM = shared_dir() / "golden" / "mm"


def tone(seconds: float = 0.5, rate: int = RATE, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def stored(samples: np.ndarray, rate: int, kind: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "subtype", "far"), [("WAV", "FLOAT", 0), ("FLAC", "PCM_24", 1e-6), ("MP3", None, 0.02)]
)
def test_files_are_read_as_their_samples(tmp_path: Path, kind: str, subtype: str | None, far: float) -> None:
    samples, data = tone(), stored(tone(), RATE, kind, subtype)
    (path := tmp_path / f"a.{kind.lower()}").write_bytes(data)
    for given in (data, path, str(path)):
        got = read_sound(given)
        assert got.dtype == np.float32 and got.shape == samples.shape
        assert np.abs(got - samples)[2000:-2000].max() <= far


def test_channels_are_averaged_and_rates_converted() -> None:
    left, right = tone(hz=300.0), tone(hz=500.0)
    both = np.stack([left, right], 1)
    mean = both.mean(1)
    np.testing.assert_array_equal(read_sound(both, RATE), mean)
    np.testing.assert_array_equal(read_sound(stored(both, RATE, "WAV", "FLOAT")), mean)
    got = read_sound(tone(1.0, 44100, 440.0), 44100)
    assert len(got) == RATE and np.abs(got - tone(1.0))[400:-400].max() < 1e-4


def test_integers_are_divided_by_their_range() -> None:
    for dtype, zero in ((np.int16, 0), (np.int32, 0), (np.uint8, 128)):
        info = np.iinfo(dtype)
        got = read_sound(np.array([info.min, zero, info.max], dtype), RATE)
        np.testing.assert_allclose(got, [-1, 0, 1], atol=0.01)
    assert read_sound([0.25, -0.25], RATE).tolist() == [0.25, -0.25]


NAN = np.array([0.0, np.nan], np.float32)


@pytest.mark.parametrize(
    ("sound", "rate", "text"),
    [
        ("missing.wav", None, "no such file"),
        (b"", None, "no sound that can be read"),
        (b"RIFF....WAVEfmt ", None, "no sound that can be read"),
        (b"\xff\xfb\x90\x00" * 9, None, "no sound that can be read"),
        (np.zeros(4), None, "need a rate"),
        (np.zeros(4), 0, "rate must be"),
        (np.zeros(4), 1 << 40, "rate must be"),
        (np.zeros(4), "fast", "rate"),
        (np.zeros(0), RATE, "empty"),
        (np.zeros((4, 0)), RATE, "0 channels"),
        (np.zeros((1, 4000)), RATE, "4000 channels"),
        (np.zeros((2, 2, 2)), RATE, r"\[n_samples\]"),
        (np.zeros(4, np.complex64), RATE, r"\[n_samples\]"),
        (np.array(["a"]), RATE, r"\[n_samples\]"),
        ([[1.0], [1.0, 2.0]], RATE, "array of samples"),
        (None, RATE, r"\[n_samples\]"),
        (NAN, RATE, "NaN"),
        (np.array([1e300]), RATE, "NaN or infinite"),
        (np.zeros(3), 768000, "empty"),
        (np.resize(np.float32([3e38, -3e38]), 100), 16001, "too large to be converted"),
    ],
)
def test_bad_sounds_are_refused(sound: Any, rate: Any, text: str) -> None:
    with pytest.raises(MediaError, match=text):
        read_sound(sound, rate)


def test_a_file_with_nan_or_without_samples_is_refused() -> None:
    with pytest.raises(MediaError, match="NaN"):
        read_sound(stored(NAN, RATE, "WAV", "FLOAT"))
    with pytest.raises(MediaError, match="empty"):
        read_sound(stored(np.zeros(0, np.float32), RATE, "WAV"))
    with pytest.raises(MediaError, match="a file says its own"):
        read_sound(stored(tone(), RATE, "WAV"), RATE)


def test_a_damaged_file_is_a_named_error_or_a_shorter_sound() -> None:
    for kind in ("WAV", "FLAC", "MP3"):
        whole = stored(tone(), RATE, kind)
        for cut in (len(whole) // 2, 50, 10):
            try:
                assert len(read_sound(whole[:cut])) <= RATE
            except MediaError as e:
                assert f"of {cut} bytes" in str(e)


def test_names_of_files(tmp_path: Path) -> None:
    """A name that is not UTF-8 can be read, and an ending does not say what a file is."""
    for name in ("\udcff.wav", "a\nb", "a.raw"):
        (tmp_path / name).write_bytes(stored(tone(), RATE, "WAV", "FLOAT"))
        np.testing.assert_array_equal(read_sound(tmp_path / name), tone())


def test_a_sound_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SOUND_SECONDS", 1)
    for sound, rate in ((tone(1.5), RATE), (stored(tone(1.5), RATE, "WAV"), None)):
        with pytest.raises(MediaError, match="seconds long: up to 1 are"):
            read_sound(sound, rate)


def test_a_small_file_is_not_held_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLAC says a second of silence in 200 bytes, and may call it 655,350 samples: six hours of it took 57 GB."""
    silence = stored(np.zeros(120 * 655350, np.int16), 655350, "FLAC")
    assert len(silence) < 1 << 20
    tracemalloc.start()
    assert len(read_sound(silence)) == 120 * RATE
    assert tracemalloc.get_traced_memory()[1] < 40 << 20  # 7.7 MB twice, and blocks; 315 MB at the file's rate
    tracemalloc.stop()
    monkeypatch.setattr(limits, "SOUND_SAMPLES", 120 * 655350 - 1)
    with pytest.raises(MediaError, match=r"more samples than limits\.SOUND_SAMPLES = 78641999"):
        read_sound(silence)


def test_a_sound_in_blocks_is_converted_as_a_whole_one() -> None:
    samples = np.random.default_rng(0).standard_normal(300_001).astype(np.float32)
    np.testing.assert_array_equal(read_sound(samples, 44100), soxr.resample(samples, 44100, RATE))


# -- features ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
@pytest.mark.parametrize("name", ["whisper", "qwen2-audio", "voxtral"])
def test_features_are_the_librarys(name: str) -> None:
    """The golden features were computed in float32, which far below the maximum differs by 1e-5."""
    from pyggml.small_file import read_json

    with np.load(MM / "sounds" / "chirp.npz") as z:
        samples = read_sound(z["samples"], int(z["rate"]))
    with np.load(MM / "mm.npz") as z:
        want = z[f"{name}/0/input_features"]
    processor = sound_processor(read_json(MM / name / "preprocessor_config.json", MediaError))
    got = processor(samples)["input_features"]
    assert got.dtype == np.float32 and got.shape == (1, processor.n_mels, 3000)
    assert ((got[..., :400] - want) ** 2).sum() / (want**2).sum() < 1e-12


def test_features_are_those_of_their_definition() -> None:
    """Frame 7 of noise, by a discrete Fourier transform written out."""
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    processor = sound_processor({"feature_size": 80})
    got = processor.frames(x)
    assert got.shape == (80, 25)
    n, t = np.arange(400), 7 * 160 - 200
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / 400)
    power = [abs((x[t : t + 400] * window * np.exp(-2j * np.pi * k * n / 400)).sum()) ** 2 for k in range(201)]
    mel = np.log10(np.asarray(power) @ mel_filters(80, 201))
    np.testing.assert_allclose(got[:, 7], (mel + 4) / 4, atol=1e-6)


def test_silence_and_long_sounds() -> None:
    processor = sound_processor({})
    assert np.unique(processor(np.zeros(16, np.float32))["input_features"]).tolist() == [-1.5]
    loud = np.concatenate([tone(30.0), tone(1.0, hz=880.0)])
    np.testing.assert_array_equal(processor(loud)["input_features"], processor(loud[:480000])["input_features"])
    assert processor.frames(loud).shape == (80, 3100)
    with pytest.raises(MediaError, match="too short"):
        processor.frames(np.zeros(200, np.float32))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "ClapFeatureExtractor"),
        ({"n_fft": 0}, "n_fft"),
        ({"feature_size": "80"}, "feature_size"),
        ({"sampling_rate": 8000}, "sampling_rate must be 16000"),
        ({"chunk_length": 1 << 40}, "chunk_length"),
        ({"hop_length": None}, "hop_length"),
        ({"dither": 0.1}, "dither"),
        ({"do_normalize": True}, "do_normalize"),
    ],
)
def test_processors_that_are_not_supported_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(MediaError, match=text):
        sound_processor(config)
