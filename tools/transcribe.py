"""`pyggml transcribe`: write down what is said in a sound."""

from __future__ import annotations

from typing import Annotated, Optional

import click

from pyggml.llm.transcribe import TEMPERATURES, Segment, Transcriber, Transcription, srt_of, vtt_of

from .command import Argument, Option
from .options import Json
from .outputs import print_json
from .running import Run


def transcribe(
    run: Run,
    sound: Annotated[str, Argument(help="A sound file (wav, flac, mp3, ogg).", metavar="SOUND")],
    srt: Annotated[bool, Option("--srt", "-osrt", help="Print subtitles (SubRip).")] = False,
    vtt: Annotated[bool, Option("--vtt", "-ovtt", help="Print subtitles (WebVTT).")] = False,
    as_json: Json = False,
    language: Annotated[
        Optional[str], Option("-l", "--language", help="en, german ... (default: it is detected).")
    ] = None,
    translate: Annotated[bool, Option("-tr", "--translate", help="Translate into English.")] = False,
    prompt: Annotated[
        Optional[str], Option("-p", "--prompt", help="Text that comes before: names and style are taken from it.")
    ] = None,
    timestamps: Annotated[
        bool, Option("--timestamps/--no-timestamps", help="Segments with times, or windows of 30 seconds.")
    ] = True,
    temp: Annotated[
        Optional[float], Option("--temp", help="Temperature (default: 0, and higher where a text is doubtful).", min=0)
    ] = None,
    seed: Annotated[int, Option("-s", "--seed", help="Of what is sampled.", min=0)] = 0,
) -> None:
    """Write down what is said in a sound, with a Whisper model. Each segment is printed as soon as it is there."""
    if srt + vtt + as_json > 1:
        raise click.BadParameter("--srt, --vtt and --json cannot be given together")
    context = run.context()
    for size in ("n_ubatch", "n_batch"):  # a window is encoded at once
        context.pop(size, None)
    with run.load() as m:
        t = Transcriber(
            m,
            sound,
            language=None if language == "auto" else language,
            task="translate" if translate else "transcribe",
            prompt=prompt,
            timestamps=timestamps,
            temperature=TEMPERATURES if temp is None else temp,
            seed=seed,
            context=context,
        )
        if vtt:
            print("WEBVTT\n", flush=True)
        found: list[Segment] = []
        for s in t.segments():
            found.append(s)
            text = s.text.strip()
            if text and not as_json:
                shown = srt_of if srt else vtt_of if vtt else None
                n = sum(bool(x.text.strip()) for x in found)
                print(text if shown is None else shown(n, s), end="\n" if shown is None else "", flush=True)
        if as_json:
            whole = Transcription("".join(s.text for s in found), found, t.language, t.duration)
            print_json(whole.as_dict())
