"""Pictures and sounds."""

from __future__ import annotations

import io
import struct
import warnings
import wave
from collections.abc import Iterable

import numpy as np

from pyggml.errors import MediaError
from pyggml.media.picture import open_picture
from pyggml.media.sound import read_sound

from .harness import harness


def _pictures() -> Iterable[bytes]:
    from PIL import Image

    image = Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3))
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        out = io.BytesIO()
        (image.convert("P") if form == "GIF" else image).save(out, form)
        yield out.getvalue()
    for mode, form in (("RGBA", "PNG"), ("I;16", "PNG"), ("CMYK", "TIFF"), ("1", "TIFF"), ("LA", "WEBP")):
        out = io.BytesIO()
        Image.new(mode, (5, 3)).save(out, form)
        yield out.getvalue()


@harness(
    "pyggml.media.picture", seeds=_pictures, allowed=MediaError, seconds=5.0,
    words="IHDR IDAT PLTE tRNS eXIf Exif acTL iCCP zTXt RIFF WEBP VP8L VP8X ANIM GIF89a NETSCAPE2.0 BM II* MM P6 P3 Pf",
)  # fmt: skip
def picture(data: bytes) -> None:
    """The bytes of a picture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = open_picture(data)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def _sounds() -> Iterable[bytes]:
    import soundfile

    samples = np.sin(np.arange(400) / 9)
    for rate, form in ((16000, "WAV"), (8000, "WAV"), (44100, "FLAC"), (22050, "OGG")):
        out = io.BytesIO()
        soundfile.write(out, samples, rate, format=form)
        yield out.getvalue()
    out = io.BytesIO()
    with wave.open(out, "wb") as w:
        w.setnchannels(3)
        w.setsampwidth(1)
        w.setframerate(11025)
        w.writeframes(bytes(range(90)))
    yield out.getvalue()
    yield (
        b"RIFF"
        + struct.pack("<I", 36)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 3, 1, 16000, 64000, 4, 32)
        + b"data\xff\xff\xff\xff"
    )


@harness(
    "pyggml.media.sound", seeds=_sounds, allowed=MediaError, seconds=5.0,
    words="RIFF WAVE fmt data fact LIST fLaC OggS vorbis OpusHead RF64 ds64 AIFF caff",
)  # fmt: skip
def sound(data: bytes) -> None:
    """The bytes of a sound."""
    samples = read_sound(data)
    assert samples.dtype == np.float32 and samples.ndim == 1 and np.isfinite(samples).all()
