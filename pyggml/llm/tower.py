"""A loaded tower: it makes features of what a processor gives."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pyggml import limits
from pyggml.backends.cpu.repack import be_fast, repack, repack_in_passing
from pyggml.errors import MediaError, ModelError, OneSite
from pyggml.gguf_io.bind import bind
from pyggml.gguf_io.read import says
from pyggml.gguf_io.split import open_model
from pyggml.inspect.watch import Watches
from pyggml.logger import LOG
from pyggml.models.blocks.vision import PIECE
from pyggml.models.towers import get_tower
from pyggml.models.towers.hparams import TowerHParams
from pyggml.models.towers.tower import Arrays, Encoded, Tower, TowerBuild, TowerSize
from pyggml.models.weights import Weights
from pyggml.sched import Scheduler
from pyggml.scope import no_scope
from pyggml.small_file import parse_json
from pyggml.tensor import Tensor

Array = npt.NDArray[Any]
# Keys that are looked at before a tower's page reads them.
_ONE_VALUE = (
    *("has_vision_encoder", "has_audio_encoder", "projector_type", "embedding_length", "feed_forward_length"),
    *("block_count", "patch_size", "projection_dim"),
)
_MAX_GRAPHS = 4  # graphs kept for reuse: pictures come in few sizes


class LoadedTower:
    """A tower with its weights: those of a folder, or of an mmproj file.

    Calling it runs the tower's graph (see `TowerRun`). With `keeps` false, pages of mapped weights are given back to
    the system after each picture or sound, and there are no repacked copies of weights. With `fast`, products round
    weights and columns (docs/products.md). Raises ModelError for metadata or tensors that are no tower's.
    """

    def __init__(
        self,
        path: str,
        kv: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        side: str = "vision",
        keeps: bool = True,
        fast: bool = False,
    ) -> None:
        self.path, self.kv = path, kv
        name = tower_name(kv, side)
        if not isinstance(name, str):
            raise ModelError(f"{path}: the key clip.projector_type, which names the tower, is missing or no string")
        try:
            self.tower: Tower[Any] = get_tower(name)
            self.hparams: TowerHParams = self.tower.hparams(kv)
            self.weights = Weights(tensors)
            self.tower.declare(self.hparams, self.weights)
            if self.weights.unused:
                names = ", ".join(self.weights.unused)
                if os.path.isdir(path):
                    raise ModelError(f"nothing asks for the tensors {names:.300} of the tower: it is not supported")
                LOG.warning("%s: nothing asks for the tensors %s", path, names)
        except ModelError as e:
            raise ModelError(f"{path}: {e}") from None
        # Products read quantised weights from repacked copies. Others stay exact, unless the tower is to be fast.
        (repack if keeps else repack_in_passing)(t for t in self.weights.values() if t.dtype.is_quantized)
        if fast:
            be_fast(self.weights.values())
        self.name, self.keeps = name, keeps
        self.folder: str | None = None  # that an mmproj file was made of, when it lies there
        self.scheduler: Scheduler | None = None
        self.watches = Watches()
        self._n_threads: int | None = None
        self._graphs: OrderedDict[object, TowerBuild[Any]] = OrderedDict()

    def tensor(self, name: str) -> Array | None:
        """See `TowerRun`."""
        t = self.weights.get(name)
        return None if t is None else np.asarray(t.numpy(), np.float32)

    def encode(self, arrays: Arrays, n_threads: int | None = None) -> Encoded:
        """Features (and, of encoders for search, the embedding) of what the processor made of one picture or sound.
        Raises ShapeError for arrays that do not fit."""
        self._n_threads = n_threads
        try:
            return self.tower.encode(self, arrays)
        finally:
            if not self.keeps:
                for t in self.weights.values():
                    if t.buffer is not None:
                        t.buffer.give_back(t.offset, t.nbytes)

    def __call__(self, size: TowerSize, **inputs: Array) -> dict[str, Array]:
        """See `TowerRun`. Many tiles run in several graphs, each of which has tiles of `PIECE` patches, so that memory
        does not grow with their number. Taps and edits see all tiles in one graph. Raises MediaError for more pairs
        of patches than `limits.PICTURE_PAIRS`."""
        if self.tower.side == "v" and size.n * (size.h * size.w) ** 2 > limits.PICTURE_PAIRS:
            raise MediaError(
                f"{self.path}: a picture becomes {size.n} tiles of {size.h} x {size.w} patches, with more pairs than "
                f"pyggml.limits.PICTURE_PAIRS ({limits.PICTURE_PAIRS})"
            )
        most = max(PIECE // (size.h * size.w), 1)
        if size.n > most and not self.watches.patterns:
            groups = [slice(i, min(i + most, size.n)) for i in range(0, size.n, most)]
            found = [
                self(size._replace(n=g.stop - g.start), **{name: a[g] for name, a in inputs.items()}) for g in groups
            ]
            return {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        if self.scheduler is None:
            self.scheduler = Scheduler(("cpu",), self._n_threads)
            self.scheduler.watches = self.watches
        with self.scheduler.lock:
            b = self._built(size)
            schedule = self.scheduler.alloc(b.graph)
            for leaf, values in b.constants.values():
                leaf.set(values)
            for name, leaf in b.given.items():
                leaf.set(inputs[name])
            schedule.run(n_threads=self._n_threads)
            return {name: np.array(t.numpy(), np.float32) for name, t in b.results.items()}

    @no_scope()
    def _built(self, size: TowerSize) -> TowerBuild[Any]:
        """The graph of that size."""
        key = size, self.watches.patterns
        if key not in self._graphs:
            b: TowerBuild[Any] = TowerBuild(self.hparams, self.weights, self.tower.side, size)
            b.asked, b.in_pieces = self.watches.asks, not self.watches.patterns
            with OneSite(), b.ctx:
                self.tower.build(b)
            self._graphs[key] = b
            if len(self._graphs) > _MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]


def open_tower_of(
    path: str, mmproj: str | None, side: str, keeps: bool = True, fast: bool = False
) -> LoadedTower | None:
    """The tower (`vision` or `audio`) of a model: that of the file `mmproj`, otherwise that of the folder `path`; None
    when there is none. Keys that an mmproj file lacks are the folder's, when that has the same kind of tower; where
    `path` is no folder, those of the folder that the file lies in. `keeps`, `fast`: see `LoadedTower`.

    Raises GGUFError for a bad file, ModelError for one that is no tower, or an unsupported one.
    """
    from pyggml.hf.towers import open_tower

    of_folder = open_tower(path) if os.path.isdir(path) else None
    if of_folder is not None and not of_folder[0].get(f"clip.has_{side}_encoder"):
        of_folder = None
    if mmproj is None:
        return None if of_folder is None else LoadedTower(path, *of_folder, side, keeps, fast)
    file = open_model(mmproj, True)
    if not says(file.kv, "general.architecture", "clip"):
        raise ModelError(f"{file.path}: no mmproj file: its general.architecture is not clip")
    for key in _ONE_VALUE:
        for name in (f"clip.{key}", f"clip.{side}.{key}"):
            if not isinstance(file.kv.get(name, 0), (bool, int, float, str)):
                raise ModelError(f"{file.path}: the key {name} must be one value, not an array")
    if not file.kv.get(f"clip.has_{side}_encoder"):
        return None
    kv, tensors = _as_today(file.kv, bind(file, keeps))
    beside = None
    if of_folder is None and not os.path.isdir(path):
        beside = _keys_beside(file.path, kv, side)
    said = of_folder[0] if of_folder is not None else beside
    if said is not None and said["clip.projector_type"] == tower_name(kv, side):
        kv = {**said, **kv}
    tower = LoadedTower(file.path, kv, tensors, side, keeps, fast)
    tower.folder = None if beside is None else os.path.dirname(file.path)
    return tower


def _as_today(kv: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """What llama.cpp's converters write otherwise than most of them do: the first ones have a network's first matrix as
    `ffn_down` and its second one as `ffn_up`, MiniCPM-V's has no number of features, and Qwen2-VL's has the width of
    the text model as that of the networks."""
    kv = dict(kv)
    first, n_embd = tensors.get("v.blk.0.ffn_down.weight"), kv.get("clip.vision.embedding_length")
    if first is not None and first.ne[0] == n_embd and first.ne[1] != n_embd:
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        parts = {name: name.split(".") for name in tensors}
        tensors = {".".join(other.get(x, x) for x in parts[name]): t for name, t in tensors.items()}
    query, up = tensors.get("resampler.query"), tensors.get("v.blk.0.ffn_up.weight")
    if query is not None and not kv.get("clip.vision.projection_dim"):
        kv["clip.vision.projection_dim"] = query.ne[0]
    if up is not None and kv.get("clip.projector_type") == "qwen2vl_merger":
        kv["clip.vision.feed_forward_length"] = up.ne[1]
    return kv, tensors


def _keys_beside(mmproj: str, kv: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """The keys of the folder that an mmproj file lies in, when the file was made of it: then both have the same tower,
    of the same sizes. llama.cpp's converter writes files there, which say little of how pictures are treated."""
    from pyggml.hf.towers import tower_keys

    try:
        found = tower_keys(os.path.dirname(mmproj) or ".")
    except ModelError:  # of another model
        return None
    if found is None or found["clip.projector_type"] != tower_name(kv, side):
        return None
    sizes = (f"clip.{side}.{key}" for key in ("embedding_length", "feed_forward_length", "block_count", "patch_size"))
    return found if all(found.get(key) == kv.get(key) for key in sizes) else None


def tower_name(kv: Mapping[str, Any], side: str) -> object:
    """What the metadata of a file with one tower, or with two, calls the tower of that side."""
    return kv.get(f"clip.{side}.projector_type", kv.get("clip.projector_type"))


def config_in_file(tower: LoadedTower) -> dict[str, Any]:
    """The config of the processor that an mmproj file of pyggml has; empty for others. Raises ModelError for damaged
    JSON."""
    from pyggml.hf.towers.family import PROCESSOR_KEY

    text = tower.kv.get(PROCESSOR_KEY)
    if text is None:
        return {}
    found = parse_json(f"{tower.path}: {PROCESSOR_KEY}", text, ModelError) if isinstance(text, str) else None
    if not isinstance(found, dict):
        raise ModelError(f"{tower.path}: the key {PROCESSOR_KEY} must be a JSON object, not {text!r:.60}")
    return cast("dict[str, Any]", found)
