"""Pictures and sounds."""

from __future__ import annotations

import io
import struct
import warnings
import wave
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from pyggml.models.towers import get_tower
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.errors import GGMLError, MediaError, ModelError
from pyggml.inspect.watch import Watches
from pyggml.llm.picture import sight_of
from pyggml.llm.tower import open_tower_of
from pyggml.media.picture import open_picture
from pyggml.media.sound import read_sound
from pyggml.tensor import rank_of

from ..gguf_files import write_all
from .changes import change_bytes, change_gguf
from .harness import folder, harness, put_file


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


def _change_wav(rng: np.random.Generator, data: bytes) -> bytes:
    """A WAV file with other fields of its format, or chunks that go, come twice or are moved; its lengths are right."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return change_bytes(rng, data)
    chunks: list[tuple[bytes, bytes]] = []
    at = 12
    while at + 8 <= len(data):
        name, n = struct.unpack_from("<4sI", data, at)
        chunks.append((name, data[at + 8 : at + 8 + n]))
        at += 8 + n + n % 2
    if not chunks:
        return change_bytes(rng, data)
    i, what = int(rng.integers(len(chunks))), int(rng.integers(5))
    name, inside = chunks[i]
    if name == b"fmt " and len(inside) >= 16 and what > 1:
        kind, channels, rate, width = (
            int(rng.choice(c))
            for c in (
                [1, 2, 3, 6, 7, 0xFFFE],
                [0, 1, 2, 3, 64],
                [0, 1, 8000, 16001, 1 << 31],
                [0, 4, 8, 12, 16, 24, 32, 64],
            )
        )
        chunks[i] = (
            name,
            struct.pack(
                "<HHIIHH", kind, channels, rate, rate * channels * width // 8 % (1 << 32), channels * width // 8, width
            )
            + inside[16:],
        )
    elif what == 0:
        chunks.insert(int(rng.integers(len(chunks) + 1)), chunks.pop(i))
    elif what == 1:
        chunks[i : i + 1] = [chunks[i]] * int(rng.choice([0, 2]))
    else:
        chunks[i] = name, change_bytes(rng, inside)
    body = b"".join(name + struct.pack("<I", len(inside)) + inside + bytes(len(inside) % 2) for name, inside in chunks)
    return data[:4] + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


@harness(
    "pyggml.media.sound", seeds=_sounds, allowed=MediaError, seconds=5.0, change=_change_wav,
    words="RIFF WAVE fmt data fact LIST fLaC OggS vorbis OpusHead RF64 ds64 AIFF caff",
)  # fmt: skip
def sound(data: bytes) -> None:
    """The bytes of a sound."""
    samples = read_sound(data)
    assert samples.dtype == np.float32 and samples.ndim == 1 and np.isfinite(samples).all()


TOWERS = (
    "mlp gemma3 idefics3 internvl pixtral llama4 lfm2 resampler minicpmv4_6 "
    "qwen2vl_merger qwen2.5vl_merger qwen3vl_merger glm4v"
)
_VISION: dict[str, Any] = {
    "embedding_length": 16,
    "feed_forward_length": 16,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.layer_norm_epsilon": 1e-6,
    "projection_dim": 16,
    "image_size": 8,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "projector.scale_factor": 2,
    "n_wa_pattern": 2,
    "window_size": 8,
    "image_min_pixels": 16,
    "image_max_pixels": 256,
    "preproc_image_size": 16,
}
_OWN = {  # pictures become 448 pixels wide at least
    "minicpmv4_6": {"patch_size": 28, "image_size": 56},
    "resampler": {"patch_size": 28, "image_size": 56, "projection_dim": 128},
}


def _towers() -> Iterable[bytes]:
    """An mmproj file of each kind, whose tensors are those that its builder asks for."""
    for name in TOWERS.split():
        w = gguf.GGUFWriter(folder() / "tower.gguf", "clip")
        keys = {**_VISION, **_OWN.get(name, {})}
        kv = {f"clip.vision.{key}": value for key, value in keys.items()}
        kv |= {"clip.has_vision_encoder": True, "clip.projector_type": name}
        for key, value in kv.items():
            {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(value)](key, value)
        tower, weights = get_tower(name), ShapeOnlyWeights()
        tower.declare(tower.hparams(kv), weights)
        for role, t in weights.items():
            w.add_tensor(role, np.full(t.ne[: rank_of(t.ne)][::-1], 0.1, np.float32))
        write_all(w)
        yield (folder() / "tower.gguf").read_bytes()


@harness(
    "pyggml.llm.tower", "pyggml.llm.picture", "pyggml.models.towers", "pyggml.media", seeds=_towers, allowed=GGMLError,
    words=TOWERS, change=change_gguf, seconds=10.0, limits={"PICTURE_PAIRS": 1 << 20, "PICTURE_PIXELS": 1 << 20},
)  # fmt: skip
def mmproj(data: bytes) -> None:
    """The tower of an mmproj file, which sees a picture."""
    path = str(put_file("mmproj.gguf", data))
    tower = open_tower_of(path, path, "vision")
    if tower is None:
        raise ModelError("no tower")
    model: Any = SimpleNamespace(path=path, watches=Watches(), image_tokens=(None, None))
    encoded = sight_of(model, tower).encode(np.arange(9 * 12 * 3, dtype=np.uint8).reshape(9, 12, 3), 1)
    assert encoded.features.rows.dtype == np.float32
