"""Open a picture: whatever it comes as, the result is RGB, upright and opaque."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .. import limits
from ..errors import MediaError, path_name
from ..small_file import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
Array: TypeAlias = npt.NDArray[Any]

_BYTES: Any = (bytes, bytearray, memoryview)

# Pillow knows more formats; these are read without another program (as it does for EPS), and are what people send.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")

_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # of a JPEG file: those that a length follows, and the end
_JPEG_BYTES = 1 << 28  # of a JPEG file: three for each pixel that a picture may have


def open_picture(image: Any) -> Pixels:
    """Read a picture.

    `image` is a path, the bytes of a file, a PIL image, or an array of uint8 (NumPy shape [height, width] for grey, or
    [height, width, n] with 1, 3 or 4 channels: grey, RGB, RGBA). Files: PNG, JPEG, GIF and WebP (of a moving picture
    the first frame), BMP, TIFF, PPM. Returns RGB: uint8, NumPy shape [height, width, 3].

    All forms of one picture give the same pixels. A photo is turned as its EXIF data says. What is transparent lies on
    white, as transformers' processors have it. Palettes, grey and CMYK become RGB by Pillow's rules. Of 16 bits, the
    upper 8 are kept (Pillow alone would make all above 255 white).

    Raises MediaError, with the picture's name, when it cannot be read, has no pixels, or has more than
    `pyggml.limits.PICTURE_PIXELS` (that is found before anything is decoded); and when Pillow is not installed.
    """
    return np.asarray(open_rgb(image))


def open_rgb(image: Any) -> Image:
    """As `open_picture`; returns a PIL image of mode RGB, on which the steps of processors work."""
    module, name = pillow(), picture_name(image)
    try:
        if isinstance(image, (str, os.PathLike)):
            with open_regular(path_name(image, MediaError), MediaError) as file:
                return _decoded(module, file)
        if isinstance(image, _BYTES):
            return _decoded(module, io.BytesIO(image))
        if isinstance(image, np.ndarray):
            return _upright_rgb(module, module.fromarray(_checked(cast(Array, image))))
        if isinstance(image, module.Image):
            return _upright_rgb(module, image)
    except MediaError as e:
        raise MediaError(f"{name}: {e}") from e.__cause__
    except OSError as e:
        raise MediaError(f"{name}: {e.strerror or e}") from e
    raise MediaError(f"a picture is a path, bytes, a PIL image or an array of uint8, not {name}")


def pillow() -> Any:
    """The module `PIL.Image`, imported now. Raises MediaError when Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MediaError("pictures need Pillow: pip install pyggml[media]") from None
    return Image


def picture_name(image: Any) -> str:
    """What messages call a picture."""
    if isinstance(image, (str, os.PathLike)):
        return f"picture {path_name(image, MediaError)}"
    if isinstance(image, _BYTES):
        return f"picture of {len(image)} bytes"
    if isinstance(image, np.ndarray):
        array = cast(Array, image)
        return f"picture in an array of {array.dtype} {list(array.shape)}"
    if isinstance(getattr(image, "mode", None), str) and hasattr(image, "size"):  # Pillow may be missing
        return f"picture in a PIL image ({image.mode}, {image.size[0]} x {image.size[1]})"
    return f"{image!r:.60}"


def check_pixels(height: int, width: int, what: str) -> None:
    """Raise MediaError when a picture of this size has no pixels, or more than `limits.PICTURE_PIXELS`."""
    if height < 1 or width < 1:
        raise MediaError(f"{what} {width} x {height} pixels")
    if height * width > limits.PICTURE_PIXELS:
        raise MediaError(
            f"{what} {width} x {height} pixels, more than pyggml.limits.PICTURE_PIXELS ({limits.PICTURE_PIXELS})"
        )


def _decoded(module: Any, file: BinaryIO) -> Image:
    if not file.read(1):
        raise MediaError("it is empty")
    try:
        file.seek(0)
        with module.open(file, formats=FORMATS) as image:  # reads the header alone
            if image.format in ("JPEG", "MPO"):
                _check_scans(file)
            return _upright_rgb(module, image)
    except MediaError:
        raise
    except (module.DecompressionBombError, module.DecompressionBombWarning) as e:
        raise MediaError(f"{e} (pyggml.limits.PICTURE_PIXELS is {limits.PICTURE_PIXELS})") from e
    except module.UnidentifiedImageError as e:
        raise MediaError(f"it is none of {', '.join(FORMATS)}") from e
    except Exception as e:  # a decoder may raise anything about a damaged file
        raise MediaError(f"it is damaged: {type(e).__name__}: {e}") from e


def _check_scans(file: BinaryIO) -> None:
    """Raise MediaError when a JPEG file goes over its pixels more than `limits.PICTURE_SCANS` times: a scan that
    changes none of them has 14 bytes, and takes as long as any other."""
    file.seek(0)
    data = file.read(_JPEG_BYTES)
    if len(data) == _JPEG_BYTES:
        raise MediaError(f"a JPEG file of {_JPEG_BYTES} bytes or more is not read")
    n, at = 0, 2
    while (found := _MARKER.search(data, at)) is not None and found[0] != b"\xff\xd9":
        n += found[0] == b"\xff\xda"
        if n > limits.PICTURE_SCANS:
            raise MediaError(f"it has more scans than pyggml.limits.PICTURE_SCANS ({limits.PICTURE_SCANS})")
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")


def _checked(array: Array) -> Array:
    """An array that Pillow can take. Raises MediaError."""
    if array.dtype != np.uint8:
        raise MediaError("an array must hold uint8, from 0 to 255")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise MediaError("an array must have the shape [height, width] or [height, width, n] with n = 1, 3 or 4")
    check_pixels(array.shape[0], array.shape[1], "it has")
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def _upright_rgb(module: Any, image: Image) -> Image:
    check_pixels(image.height, image.width, "it has")
    if image.mode != "RGB" or image.info or getattr(image, "fp", None) is not None:
        try:
            return _converted(module, image)
        except MediaError:
            raise
        except Exception as e:
            raise MediaError(f"it is damaged: {type(e).__name__}: {e}") from e
    return image


def _converted(module: Any, image: Image) -> Image:
    from PIL import ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        upper = np.asarray(image).astype(np.uint16) >> 8  # whatever the order of its bytes
        return module.fromarray(upper.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        values: Array = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 255):  # NaN is not, either
            raise MediaError(f"pixels of mode {image.mode} must be from 0 to 255")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = module.new("RGBA", image.size, (255, 255, 255, 255))
        return module.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
