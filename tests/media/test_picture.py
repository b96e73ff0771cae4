"""Opening pictures: all forms of one picture give the same pixels; what is none is a MediaError that names it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml.limits
from pyggml import GGMLError, MediaError
from pyggml.media import open_picture, picture_processor

Image = pytest.importorskip("PIL.Image")
RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
GREY = RGB[..., 0]


def stored(image: Any, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_forms(tmp_path: Path) -> None:
    """Path, text, bytes, PIL image and array of one picture are the same."""
    image = Image.fromarray(RGB)
    data = stored(image)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    for form in (path, str(path), data, bytearray(data), memoryview(data), image, RGB, Image.open(path)):
        made = open_picture(form)
        assert made.dtype == np.uint8 and np.array_equal(made, RGB)
    assert np.array_equal(open_picture(RGB[::-1, ::2]), RGB[::-1, ::2])


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "WEBP", "GIF", "JPEG"])
def test_formats(form: str) -> None:
    made = open_picture(stored(Image.fromarray(np.full((4, 6, 3), 200, np.uint8)), form))
    assert made.shape == (4, 6, 3) and abs(made.astype(int) - 200).max() <= 2


def test_grey_and_black_and_white() -> None:
    want = np.repeat(GREY[..., None], 3, 2)
    for form in (GREY, GREY[..., None], Image.fromarray(GREY), stored(Image.fromarray(GREY))):
        assert np.array_equal(open_picture(form), want)
    bits = np.array([[True, False]])
    assert open_picture(stored(Image.fromarray(bits)))[..., 0].tolist() == [[255, 0]]


def test_alpha_lies_on_white() -> None:
    """As transformers' convert_to_rgb has it: by an alpha channel, in a palette, or by one transparent colour."""
    alpha = RGB[..., 1:2]
    rgba = np.concatenate([RGB, alpha], 2)
    share = alpha / 255
    want = np.round(share * RGB + (1 - share) * 255).astype(np.uint8)
    for form in (rgba, Image.fromarray(rgba), stored(Image.fromarray(rgba))):
        assert np.array_equal(open_picture(form), want)
    grey = stored(Image.fromarray(np.array([[[10, 255], [10, 0]]], np.uint8), "LA"))
    assert open_picture(grey)[..., 0].tolist() == [[10, 255]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([1, 2, 3, 4, 5, 6])
    assert open_picture(stored(palette)).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert open_picture(stored(palette, transparency=1)).tolist() == [[[1, 2, 3], [255] * 3]]
    assert open_picture(stored(palette, transparency=b"\x00\xff")).tolist() == [[[255] * 3, [4, 5, 6]]]
    keyed = stored(Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)), transparency=(4, 5, 6))
    assert open_picture(keyed).tolist() == [[[1, 2, 3], [255] * 3]]


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif(turn: int) -> None:
    """A photo stands upright, whichever way it is stored."""
    turns = [None, lambda a: a[:, ::-1], lambda a: a[::-1, ::-1], lambda a: a[::-1], lambda a: a.transpose(1, 0, 2)]
    turns += [lambda a: np.rot90(a, -1), lambda a: a[::-1, ::-1].transpose(1, 0, 2), lambda a: np.rot90(a, 1)]
    to_upright = turns[turn - 1]
    want = RGB if to_upright is None else to_upright(RGB)
    exif = Image.Exif()
    exif[0x0112] = turn
    data = stored(Image.fromarray(RGB), exif=exif)
    for form in (data, Image.open(io.BytesIO(data))):
        assert np.array_equal(open_picture(form), want)


def test_16_bits_and_cmyk() -> None:
    """The upper 8 of 16 bits are kept."""
    deep = np.array([[0, 255, 256, 65535]], np.uint16)
    for form in ("PNG", "TIFF"):
        assert open_picture(stored(Image.fromarray(deep), form))[..., 0].tolist() == [[0, 0, 1, 255]]
    cmyk = Image.fromarray(RGB).convert("CMYK")
    assert np.array_equal(open_picture(stored(cmyk, "TIFF")), RGB)


def test_numbers_of_32_bits() -> None:
    """They are taken when they are pixels from 0 to 255; NaN is not."""
    assert open_picture(Image.fromarray(np.array([[7, 255]], np.int32)))[..., 0].tolist() == [[7, 255]]
    for array in (np.array([[7, 256]], np.int32), np.array([[np.nan, 1]], np.float32), np.array([[-1.0]], np.float32)):
        with pytest.raises(
            MediaError, match=r"picture in a PIL image \([IF], \d x 1\): pixels of mode . must be from 0"
        ):
            open_picture(Image.fromarray(array))


def test_first_frame() -> None:
    frames = [Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (10, 200)]
    for form in ("GIF", "WEBP", "PNG"):
        data = stored(frames[0], form, save_all=True, append_images=frames[1:])
        assert abs(open_picture(data).astype(int) - 10).max() <= 2


def test_one_pixel() -> None:
    assert open_picture(stored(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.full((4, 4, 3), np.nan),
        np.zeros((4, 4), np.uint16),
        np.zeros((4, 4), bool),
        np.zeros((4, 4), object),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        np.zeros((), np.uint8),
        np.zeros((0, 4), np.uint8),
        np.zeros((4, 0, 3), np.uint8),
    ],
    ids=str,
)
def test_bad_arrays(array: Any) -> None:
    with pytest.raises(MediaError, match=rf"picture in an array of {array.dtype} \[.*\]: (an array must|it has)"):
        open_picture(array)


@pytest.mark.parametrize("thing", [None, 3, 1.5, [RGB], {"image": RGB}, io.BytesIO()], ids=type)
def test_no_picture(thing: Any) -> None:
    with pytest.raises(MediaError, match="a picture is a path, bytes, a PIL image or an array of uint8, not"):
        open_picture(thing)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"picture .*nowhere.png: No such file"):
        open_picture(tmp_path / "nowhere.png")
    with pytest.raises(MediaError, match=r"picture .*: Is a directory"):
        open_picture(tmp_path)
    with pytest.raises(MediaError, match="a path cannot be"):
        open_picture("a\0.png")
    for name, data in {"empty": b"", "text": b"%PDF-1.7 ...", "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MediaError, match=f"picture .*{name}: it is (empty|none of PNG)"):
            open_picture(tmp_path / name)
        with pytest.raises(MediaError, match=f"picture of {len(data)} bytes: it is (empty|none of PNG)"):
            open_picture(data)


def test_damaged_files() -> None:
    """Files that end early, and files with other bytes in them, are MediaErrors or pictures: never anything else."""
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        data = stored(image, form)
        with pytest.raises(MediaError, match=r"picture of \d+ bytes: it is (damaged|none of)"):
            open_picture(data[: len(data) // 2])
        for _ in range(20):
            changed = bytearray(data)
            for at in rng.integers(0, len(data), 5):
                changed[at] = rng.integers(256)
            with warnings.catch_warnings():  # some decoders warn before they fail
                warnings.simplefilter("ignore")
                with contextlib.suppress(MediaError):
                    assert open_picture(changed).ndim == 3


def png_of(width: int, height: int) -> bytes:
    """A PNG file that says that it is so large, and has no pixels."""
    made = b"\x89PNG\r\n\x1a\n"
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        made += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return made


@pytest.mark.parametrize("side", [9460, 12000, 20000, 1 << 30])
def test_too_large(side: int) -> None:
    """Refused by the header, below and above the sizes at which Pillow itself warns and refuses."""
    with pytest.raises(MediaError, match=r"picture of \d+ bytes: .*pyggml.limits.PICTURE_PIXELS"):
        open_picture(png_of(side, side))


def test_a_jpeg_that_is_gone_over_again_and_again() -> None:
    """A scan of 14 bytes takes as long as any other: 1 MB of them on 89 million pixels took more than an hour."""
    data = stored(Image.new("L", (64, 64)), "JPEG", progressive=True, comment=b"\xff\xda" * 1000)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert open_picture(data[:-2] + scan * 100 + data[-2:] + scan * 1000).shape == (64, 64, 3)
    with pytest.raises(MediaError, match=r"more scans than pyggml\.limits\.PICTURE_SCANS \(128\)"):
        open_picture(data[:-2] + scan * 1000 + data[-2:])


def test_a_jpeg_that_never_seems_to_end(tmp_path: Path) -> None:
    with open(path := tmp_path / "a.jpg", "wb") as file:
        file.write(stored(Image.new("L", (8, 8)), "JPEG")[:-2])
        file.truncate(1 << 40)
    with pytest.raises(MediaError, match="268435456 bytes or more"):
        open_picture(path)


def test_the_limit_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyggml.limits, "PICTURE_PIXELS", 34)
    for form in (RGB, Image.fromarray(RGB), stored(Image.fromarray(RGB))):
        with pytest.raises(MediaError, match=r"it has 7 x 5 pixels, more than pyggml.limits.PICTURE_PIXELS \(34\)"):
            open_picture(form)
    monkeypatch.setattr(pyggml.limits, "PICTURE_PIXELS", 35)
    assert open_picture(RGB).shape == (5, 7, 3)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    process = picture_processor({"image_processor_type": "ViTImageProcessor"})
    for use in (open_picture, process):
        with pytest.raises(MediaError, match=r"pictures need Pillow: pip install pyggml\[media\]"):
            use(RGB)


def test_importing_imports_no_pillow() -> None:
    """`import pyggml` imports nothing of pictures, `pyggml.media` no Pillow."""
    for module, absent in (("pyggml", "pyggml.media"), ("pyggml.media", "PIL")):
        code = f"import sys, {module}; assert {absent!r} not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_is_pyggmls() -> None:
    assert issubclass(MediaError, GGMLError)
