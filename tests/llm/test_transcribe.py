"""Whisper writes down sounds: tokens and times against the transformers library's, and what happens in doubt.

`whisper_segments.json` has what `WhisperForConditionalGeneration.generate` of transformers 5.23 gave for the random
model and sounds of `tests/random_whisper.py` (greedy, return_timestamps, task transcribe, no thresholds; features of
the NumPy extractor; with and without condition_on_prev_tokens): [start, end, tokens] of each segment.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.dtypes import DType
from pyggml.errors import GGMLError, MediaError, ModelError, OptionError
from pyggml.llm.model import Model, load_model
from pyggml.llm.speech import LANGUAGES, language_code
from pyggml.llm.transcribe import Segment, Transcription

from ..random_whisper import FIRST_STAMP, IDS, N_VOCAB, sound, write_whisper

WANT: dict[str, list[tuple[float, float, list[int]]]] = json.loads(
    Path(__file__).with_name("whisper_segments.json").read_text()
)
SOUNDS = {"a": (30.0, 0), "b": (70.0, 1), "c": (3.0, 2)}
NO_DOUBT: dict[str, Any] = {
    "temperature": 0.0,
    "logprob_threshold": None,
    "compression_ratio_threshold": None,
    "no_speech_threshold": None,
    "context": {"type_k": DType.F32, "type_v": DType.F32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, repack=False)


@pytest.mark.parametrize("name", sorted(WANT))
def test_segments_are_the_librarys(name: str, model: Model) -> None:
    """Of the sound of 3 seconds the library goes on with the silence that makes it 30 seconds long."""
    which, _, conditions = name.partition("/")
    got = model.transcribe(sound(*SOUNDS[which]), condition_on_previous_text=conditions == "True", **NO_DOUBT)
    want = WANT[name][: len(got.segments)] if which == "c" else WANT[name]
    assert [s.tokens for s in got.segments] == [tokens for _, _, tokens in want]
    np.testing.assert_allclose([(s.start, s.end) for s in got.segments], [w[:2] for w in want], atol=1e-6)
    assert got.language == ("fr" if which == "c" else "en") and got.duration == SOUNDS[which][0]
    assert got.text == "".join(s.text for s in got.segments)


def test_timestamps_keep_their_rules(model: Model) -> None:
    """At a high temperature, where tokens are anything that is allowed."""
    for seed in range(3):
        got = model.transcribe(sound(5.0, seed), **{**NO_DOUBT, "temperature": 20.0, "seed": seed})
        for s in got.segments:
            stamps = [t for t in s.tokens if t >= FIRST_STAMP]
            assert s.tokens and s.tokens[0] in stamps and stamps == sorted(stamps)
            assert not {3, 7, *list(IDS.values())[1:]} & set(s.tokens)
        first = got.segments[0].tokens
        assert first[0] <= FIRST_STAMP + 50 and first[1] < FIRST_STAMP


def test_no_timestamps(model: Model) -> None:
    got = model.transcribe(sound(40.0), timestamps=False, language="de", **NO_DOUBT)
    assert [(s.start, s.end) for s in got.segments] == [(0.0, 30.0), (30.0, pytest.approx(40.0))]
    assert got.language == "de"


def test_a_doubtful_text_is_tried_again(model: Model) -> None:
    options = {**NO_DOUBT, "logprob_threshold": 0.0, "temperature": (0.0, 0.3, 0.9)}  # nothing is as likely as that
    got = model.transcribe(sound(3.0), **options)
    assert {s.temperature for s in got.segments} == {0.9}
    assert got == model.transcribe(sound(3.0), **options)  # the seed is the same
    options = {**NO_DOUBT, "compression_ratio_threshold": 0.0, "temperature": (0.0, 0.3)}
    assert model.transcribe(sound(3.0), **options).segments[0].temperature == 0.3
    options = {**NO_DOUBT, "logprob_threshold": -100.0, "compression_ratio_threshold": 100.0, "temperature": (0.0, 0.3)}
    assert model.transcribe(sound(3.0), **options).segments[0].temperature == 0.0


def test_nobody_speaks(model: Model) -> None:
    options = {**NO_DOUBT, "logprob_threshold": 0.0, "no_speech_threshold": 0.0, "temperature": (0.0, 0.3)}
    got = model.transcribe(sound(31.0), **options)
    assert got.segments == [] and got.text == "" and got.srt() == "" and got.vtt() == "WEBVTT\n\n"


def test_a_prompt_changes_the_text(model: Model) -> None:
    plain, prompted = (model.transcribe(sound(3.0), prompt=p, **NO_DOUBT).segments for p in (None, "names"))
    assert [s.tokens for s in plain] != [s.tokens for s in prompted]
    long = model.transcribe(sound(3.0), prompt="x" * 500, **NO_DOUBT).segments  # its end is taken
    assert [s.tokens for s in long] == [
        s.tokens for s in model.transcribe(sound(3.0), prompt="x" * 90, **NO_DOUBT).segments
    ]


def test_subtitles() -> None:
    def segment(start: float, end: float, text: str) -> Segment:
        return Segment(start, end, text, [], 0.0, -0.1, 1.0, 0.0)

    got = Transcription("", [segment(0, 1.5, " Hi."), segment(1.5, 2, " "), segment(3599.9996, 36000, " You")], "en", 1)
    assert got.srt() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHi.\n\n2\n01:00:00,000 --> 10:00:00,000\nYou\n\n"
    )  # rounded, and without the empty one
    assert got.vtt() == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHi.\n\n01:00:00.000 --> 10:00:00.000\nYou\n\n"


def test_languages() -> None:
    assert len(LANGUAGES) == 100 and len(set(LANGUAGES.values())) == 100
    assert [language_code(n) for n in ("en", "English", "<|de|>", "Haitian Creole", "??")] == [
        "en",
        "en",
        "de",
        "ht",
        "??",
    ]


def test_bad_options(model: Model) -> None:
    for options, error, says in (
        ({"language": "xx"}, OptionError, "en, de, fr"),
        ({"task": "sing"}, OptionError, "transcribe"),
        ({"temperature": ()}, OptionError, "temperature"),
        ({"temperature": -1.0}, OptionError, "temperature"),
        ({"temperature": float("nan")}, OptionError, "temperature"),
        ({"prompt": [N_VOCAB]}, GGMLError, str(N_VOCAB)),
        ({"rate": 5}, MediaError, "rate"),
    ):
        with pytest.raises(error, match=says):
            model.transcribe(sound(1.0), **options)
    with pytest.raises(MediaError, match="empty"):
        model.transcribe(np.zeros(0))
    with pytest.raises(MediaError, match="no such file"):
        model.transcribe("none.wav")


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    for generation, says in (
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"suppress_tokens": [N_VOCAB]}, f"special token {N_VOCAB}"),
        ({"lang_to_id": {"<|en|>": "x"}}, "lang_to_id"),
        ({"no_timestamps_token_id": 1.5}, "no_timestamps_token_id"),
    ):
        with pytest.raises(ModelError, match=says):
            load_model(write_whisper(tmp_path / "a", **generation)).transcribe(sound(1.0))
    write_whisper(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_model(tmp_path / "a").transcribe(sound(1.0))
    shutil.copytree(folder, tmp_path / "b")
    (tmp_path / "b" / "preprocessor_config.json").write_text('{"feature_size": 128}')
    with pytest.raises(ModelError, match="128 features"):
        load_model(tmp_path / "b").encode_audio(sound(1.0))


def test_without_generation_config(tmp_path: Path) -> None:
    """Special tokens are found by their texts; those that tell what to do are never written."""
    write_whisper(tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").unlink()
    got = load_model(tmp_path / "a", repack=False).transcribe(sound(3.0), **NO_DOUBT)
    assert got.language in ("en", "de", "fr")
    assert not {IDS["<|startoftranscript|>"], IDS["<|startofprev|>"]} & {t for s in got.segments for t in s.tokens}


def test_the_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile: Any = pytest.importorskip("soundfile")
    path = tmp_path / "a.wav"
    soundfile.write(path, sound(3.0, 2), 16000, subtype="FLOAT")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            main(["transcribe", "-m", str(folder), str(path), "-t", "1", "--temp", "0", *args])
        assert isinstance(e.value.code, int)
        return e.value.code, *capsys.readouterr()

    code, out, _ = run("--json")
    found = json.loads(out)
    assert code == 0 and found["language"] == "fr" and found["duration"] == 3.0
    first = found["segments"][0]
    code, out, _ = run("--srt")
    assert code == 0 and out.startswith("1\n00:00:00,660 --> 00:00:27,380\n" + first["text"].strip())
    assert run("--vtt")[1].startswith("WEBVTT\n\n00:00:00.660 --> 00:00:27.380\n")
    assert run()[1].startswith(first["text"].strip())
    assert run("--language", "german", "--translate")[0] == 0
    assert run("--srt", "--vtt")[0] == 2
    assert run("--language", "xx")[::2] == (1, "pyggml: language must be one of en, de, fr, not 'xx'\n")
