"""What a model sees: features and embeddings of pictures, by the tower of its folder or of its mmproj file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.media import Features, picture_processor
from pyggml.models.towers.hparams import VisionHParams
from pyggml.models.towers.tower import Encoded
from pyggml.types import Floats

from .embed import normalized
from .sense import sense
from .tower import LoadedTower, config_in_file

if TYPE_CHECKING:
    from .loaded import LoadedModel

# The decimal numbers of CLIP's mean and deviation, by what a file has of them in F32. Others are the shortest decimal
# number that F32 rounds to the same.
_CLIP = {np.float32(x): x for x in (0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711)}
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


class Sight(NamedTuple):
    """The tower of a model that sees, and the checkpoint's treatment of pictures."""

    tower: LoadedTower
    processor: Callable[[Any], dict[str, npt.NDArray[Any]]]

    def encode(self, image: Any, n_threads: int | None = None) -> Encoded:
        """Features and embedding of a picture."""
        return self.tower.encode(self.processor(image), n_threads)


def sight(model: LoadedModel) -> Sight:
    """The tower of a model that sees, loaded when it is first asked for. Raises ModelError when there is none."""
    return sense(model, "vision", sight_of)


def sight_of(model: LoadedModel, tower: LoadedTower) -> Sight:
    """A tower with the processor of its folder or file. Taps and edits of the model see its graphs."""
    tower.watches = model.watches
    return Sight(tower, picture_processor(_config(model, tower), model.image_tokens))


def _config(model: LoadedModel, tower: LoadedTower) -> Mapping[str, Any]:
    """The processor's config: that in the tower's file, or the folder's, otherwise what the keys of the file say."""
    own = config_in_file(tower)
    if own:
        return own
    folder = model.path if os.path.isdir(model.path) else tower.folder
    if folder is not None:
        from pyggml.hf.parts import read_object

        config: dict[str, Any] = {}
        for name in _PROCESSOR:  # the second one says more, and what it says counts
            config |= read_object(Path(folder) / name)
        if config:
            return config
    return processor_config(tower)


def processor_config(tower: LoadedTower) -> dict[str, Any]:
    """The config of a processor for the tower of an mmproj file, which has the picture's size, mean and deviation, and
    for some towers limits. What the file does not say is as in the released models of the family; limits that the file
    of a tower for pictures of any size does not say are llama.cpp's, whose converter leaves them out.

    Raises ModelError for a value that makes no sense.
    """
    hp, kv = tower.hparams, tower.kv
    assert isinstance(hp, VisionHParams)
    merge: int = getattr(hp, "merge", 1)

    def said(key: str, default: int) -> int:
        value = kv.get(f"clip.vision.{key}", default)
        if type(value) is not int or value < 1:
            raise ModelError(f"{tower.path}: the key clip.vision.{key} must be a positive integer, not {value!r:.60}")
        return value

    def three(key: str, default: float) -> list[float]:
        value = np.asarray(kv.get(f"clip.vision.{key}", [default] * 3))
        if value.shape != (3,) or value.dtype.kind not in "fi":
            raise ModelError(f"{tower.path}: the key clip.vision.{key} must have three numbers")
        return [_CLIP.get(v, float(str(v))) for v in value.astype(np.float32)]

    square = {"height": hp.image_size, "width": hp.image_size}
    colours = {"image_mean": three("image_mean", 0.5), "image_std": three("image_std", 0.5)}
    edge = {"shortest_edge": hp.image_size}
    cropped = {"image_processor_type": "CLIPImageProcessor", "size": edge, "crop_size": square}
    squeezed = {"image_processor_type": "SiglipImageProcessor", "size": square}
    tiles = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": square,
        "crop_to_patches": True,
        "min_patches": said("preproc_min_tiles", 1),
        "max_patches": said("preproc_max_tiles", 12),
    }
    unit = (hp.patch_size * merge) ** 2  # pixels of a feature

    def within(kind: str, frames: int = 1) -> dict[str, Any]:
        """A picture of 8 to 4,096 features. `frames`: how often the processor counts its pixels."""
        size = {
            "shortest_edge": said("image_min_pixels", 8 * unit) * frames,
            "longest_edge": said("image_max_pixels", 4096 * unit) * frames,
        }
        patches = {"patch_size": hp.patch_size, "merge_size": merge, "temporal_patch_size": 2}
        return {"image_processor_type": kind, "size": size, **patches}

    pinpoints: tuple[tuple[int, int], ...] = getattr(hp, "pinpoints", ())
    kind: dict[str, Any]
    if tower.name == "mlp" and pinpoints:
        of = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [list(p) for p in pinpoints]}
        kind = {**cropped, **of}
    elif tower.name in ("clip", "dinov2", "mlp"):
        kind = cropped if "v.class_embd" in tower.weights else squeezed
    elif tower.name == "gemma3":
        kind = {"image_processor_type": "Gemma3ImageProcessor", "size": square}
    elif tower.name == "idefics3":
        kind = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": said("preproc_image_size", 4 * hp.image_size)},
            "max_image_size": {"longest_edge": hp.image_size},
        }
    elif tower.name in ("internvl", "aya_vision"):
        kind = tiles
    elif tower.name == "pixtral":
        side = hp.patch_size * merge
        kind = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": hp.image_size}}
        kind["patch_size"] = {"height": side, "width": side}
    elif tower.name == "llama4":
        kind = {"image_processor_type": "Llama4ImageProcessor", "size": square}
    elif tower.name == "lfm2":
        kind = {"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": hp.patch_size}
        kind["downsample_factor"] = getattr(hp, "factor", 2)
    elif tower.name == "resampler":
        kind = {"image_processor_type": "MiniCPMVImageProcessor", "patch_size": hp.patch_size}
    elif tower.name == "minicpmv4_6":
        kind = {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": hp.patch_size}
        kind["downsample_mode"] = "4x" if getattr(hp, "factor", 4) == 2 else "16x"
    elif tower.name == "glm4v":
        kind = within("Glm4vImageProcessor", 2)
    elif tower.name in ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"):
        kind = within("Qwen2VLImageProcessor")
    else:
        kind = squeezed
    return {**kind, **colours}


def picture_features(self: LoadedModel, image: Any, n_threads: int | None = None) -> Features:
    """What the tower makes of a picture, on its way into the text."""
    return sight(self).encode(image, n_threads).features


def process_image(self: LoadedModel, image: Any) -> dict[str, npt.NDArray[Any]]:
    """A picture as the checkpoint's own processor gives it to the tower: arrays by name, `pixel_values` (float32) among
    them.

    image  a path, the bytes of a file, a PIL image, or a uint8 array [height, width, 3]

    Raises MediaError for a picture that cannot be read, ModelError for a model that does not see.
    """
    return sight(self).processor(image)


def encode_image(self: LoadedModel, image: Any, n_threads: int | None = None) -> Floats:
    """float32 [n_tokens, n_embd]: what takes the places of a picture's tokens in the text; of encoders (CLIP, SigLIP,
    DINOv2, ViT) the last hidden states.

    `image`: as in `process_image`, and so are the errors.
    """
    return picture_features(self, image, n_threads).rows


def embed_image(
    self: LoadedModel, images: Iterable[Any], normalize: bool | float = False, n_threads: int | None = None
) -> Floats:
    """One vector for each picture, float32 [n_images, n_embd]: CLIP's projection, SigLIP's pooler, DINOv2's class
    token, ViT's pooler.

    `images`: a list of what `process_image` takes. `normalize`: see `normalized`; the cosine of two pictures is the
    product of their vectors with `normalize=True`. Raises as `process_image`, ModelError for a tower that makes
    features of a text model alone.
    """
    rows = _one_row_each(self, images, "embedding", "makes no embedding of a whole picture", n_threads)
    return normalized(rows, normalize)


def classify_image(self: LoadedModel, images: Iterable[Any], n_threads: int | None = None) -> Floats:
    """The scores (logits) that a checkpoint for classification gives its classes, float32 [n_images, n_classes]. The
    names of the classes are `model.kv["clip.vision.classifier.output_labels"]`.

    Of ViT, DINOv2, CLIP and SigLIP checkpoints `...ForImageClassification`. Raises as `embed_image`.
    """
    return _one_row_each(self, images, "scores", "does not classify: it has no classifier", n_threads)


def _one_row_each(self: LoadedModel, images: Iterable[Any], what: str, without: str, n_threads: int | None) -> Floats:
    if isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"images must be a list of pictures, not {type(images).__name__}")
    seen, rows = sight(self), list[npt.NDArray[Any]]()
    for image in images:
        row = getattr(seen.encode(image, n_threads), what)
        if row is None:
            raise ModelError(f"{self.path}: the tower {seen.tower.name} {without}")
        rows.append(row)
    return np.stack(rows) if rows else np.empty((0, seen.tower.hparams.n_embd_out), np.float32)
