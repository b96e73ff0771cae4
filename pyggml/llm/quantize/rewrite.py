"""Write a GGUF file or a Hugging Face folder as a GGUF file with its weights in other types, a few rows at a time."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from pyggml.backends.quantize import dequantize, quantize
from pyggml.buffers.buffer import ALIGNMENT
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, GGUFError, ModelError, ShapeError
from pyggml.gguf_io.baked import LAYOUT, baked_info, layout_records
from pyggml.gguf_io.read import ALIGNMENT_KEY
from pyggml.gguf_io.split import SPLIT_KEYS, SplitOut, part_path, prefix_of, split_tensors
from pyggml.gguf_io.write import GGUFOut, TensorInfo, kv_record, stored_bytes
from pyggml.models import get_architecture
from pyggml.native.thread_pool import ThreadPool
from pyggml.native.threads import thread_count
from pyggml.tensor import rank_of

from .bake import baked_weights, packed_pieces
from .imatrix import Floats, Imatrix
from .mixes import MIXES, Choice, Mix, find_mix, is_quantizable, tensor_type
from .source import Bytes, Source, SourceTensor, open_source

Progress = Callable[[int, int], None]  # elements done, elements in all

_CHUNK = 1 << 19  # elements that a thread converts at a time
_QUANTIZATION_VERSION = 2  # the version of ggml's block formats
_FILE_TYPE_KEY, _VERSION_KEY = "general.file_type", "general.quantization_version"
_F16_MAX = 65504.0
_FEW_BITS = (DType.IQ3_XXS, DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S, DType.IQ1_M, DType.IQ1_S)


@dataclass
class TensorError:
    """What a tensor lost in conversion: sums over its elements x and their stored values."""

    n: int = 0
    error: float = 0.0  # sum of squared differences
    power: float = 0.0  # sum of x squared
    max_error: float = 0.0

    def add(self, x: Floats, stored: Floats) -> None:
        """Add the errors of further elements."""
        diff = np.subtract(stored, x, dtype=np.float64).reshape(-1)
        self.n += diff.size
        self.error += float(diff @ diff)
        self.power += float(np.sum(np.square(x, dtype=np.float64)))
        self.max_error = max(self.max_error, float(np.max(np.abs(diff), initial=0.0)))

    def include(self, other: TensorError) -> None:
        """Add the sums of another one."""
        self.n += other.n
        self.error += other.error
        self.power += other.power
        self.max_error = max(self.max_error, other.max_error)

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return math.sqrt(self.error / self.n) if self.n else 0.0

    @property
    def nmse(self) -> float:
        """Squared error over squared values."""
        return self.error / self.power if self.power else 0.0


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the new file. `weights` [matrices, columns] are its importance matrix. `error` adds up while the
    tensor is written; None when no report was asked for. It is written as `stored`, `packed` for the CPU, or both."""

    source: SourceTensor
    dtype: DType
    weights: Floats | None = None
    error: TensorError | None = None
    stored: bool = True
    packed: bool = False

    @property
    def infos(self) -> list[TensorInfo]:
        """Its entries in the new file."""
        name, ne = self.source.name, self.source.ne
        as_stored = [(name, self.dtype, ne[: rank_of(ne)])] if self.stored else []
        return [*as_stored, baked_info(name, self.dtype, ne)] if self.packed else as_stored

    @property
    def nbytes(self) -> int:
        """Its bytes in the new file."""
        return sum(stored_bytes(dtype, ne) for _, dtype, ne in self.infos)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each element."""
        return 8 * self.nbytes / math.prod(self.source.ne)


# Tensors of towers that stay as they are: kernels, and matrices that graphs read in another layout.
_KERNELS = ("v.patch_embd", "a.conv1d", "mm.patch_merger", "mm.input_projection")


@dataclass(frozen=True)
class RewritePlan:
    """What `write_quantized` will do. `without_imatrix` names the tensors that lack an importance matrix although they
    get very few bits."""

    source: Source
    file_type: int
    tensors: list[TensorPlan]
    without_imatrix: list[str]

    @property
    def n_elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(t.source.ne) for t in self.tensors)

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(t.source.nbytes for t in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors in the new file."""
        return sum(t.nbytes for t in self.tensors)


def plan_quantization(
    path: str | os.PathLike[str],
    type_name: str | None,
    *,
    vocab_only: bool = False,
    imatrix: Imatrix | None = None,
    pure: bool = False,
    output_tensor_type: DType | None = None,
    token_embedding_type: DType | None = None,
    tensor_types: Sequence[tuple[str, DType]] = (),
    leave_output_tensor: bool = False,
    allow_requantize: bool = False,
    report: bool = False,
    layout: str | None = None,
) -> RewritePlan:
    """Choose the type of each tensor of `path`, a GGUF file or a Hugging Face folder, as llama.cpp does for the file
    type `type_name`; None keeps the types. `vocab_only` plans a file without tensors.

    The matrices of towers (`mmproj` files) all have the base type of the mix; convolutions stay as they are.
    `pure` gives every matrix the base type of the mix. `output_tensor_type` and `token_embedding_type` override the mix
    for `output.weight` and `token_embd.weight`; `tensor_types` (pairs of a regular expression and a type) override it
    for tensors in whose names the expression is found. `leave_output_tensor` keeps `output.weight` as it is. `report`
    measures what each tensor loses while it is written. `layout` "r16" stores the weights of products in the layout of
    the CPU's kernels, see `pyggml.gguf_io.baked`.
    Raises GGUFError for a bad file, ModelError for an unknown architecture or bad hyperparameters, ShapeError for an
    importance matrix that does not fit. Raises DTypeError for an unknown type name, a pattern that is malformed or that
    no tensor matches, a tensor that is quantized already (without `allow_requantize`), and a layout that no weight can
    have.
    """
    source = open_source(path, vocab_only)
    arch = source.kv.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{source.path}: the key general.architecture is missing or no string")
    if type_name is None or vocab_only:
        as_they_are = [] if vocab_only else [TensorPlan(t, t.dtype) for t in source.tensors.values()]
        said = source.kv.get(_FILE_TYPE_KEY)
        file_type = said if isinstance(said, int) else _file_type_of(as_they_are)
        return RewritePlan(source, file_type, _laid_out(source, arch, as_they_are, layout), [])
    _, mix = find_mix(type_name)
    tower = arch == "clip"
    hp = None if tower else get_architecture(arch).hparams(arch, source.kv)
    types = tuple((_pattern(text), dtype) for text, dtype in tensor_types)
    choice = Choice(mix, imatrix is not None, pure, output_tensor_type, token_embedding_type, types)
    for pattern, _ in types:
        if not any(pattern.search(t.name) and is_quantizable(t.name, t.ne) for t in source.tensors.values()):
            raise DTypeError(f"no tensor that is quantised has {pattern.pattern!r} in its name")
    has_output = "output.weight" in source.tensors
    tensors: list[TensorPlan] = []
    without: list[str] = []
    for t in source.tensors.values():
        taken = is_quantizable(t.name, t.ne) and not (leave_output_tensor and t.name == "output.weight")
        taken &= not (tower and t.ne[2] * t.ne[3] > 1) and not t.name.startswith(_KERNELS)
        dtype = tensor_type(choice, hp, has_output, t.name, t.ne) if taken else t.dtype
        weights = None
        if dtype is not t.dtype:
            _check_source(t, allow_requantize)
            weights = _weights_of(t, imatrix)
            if weights is None and _wants_imatrix(t.name, dtype, mix):
                without.append(t.name)
        measured = report and is_quantizable(t.name, t.ne)
        tensors.append(TensorPlan(t, dtype, weights, TensorError() if measured else None))
    return RewritePlan(source, mix.file_type, _laid_out(source, arch, tensors, layout), without)


def _laid_out(source: Source, arch: str, tensors: list[TensorPlan], layout: str | None) -> list[TensorPlan]:
    """The tensors in a layout."""
    if layout is None:
        return tensors
    if layout != LAYOUT:
        raise DTypeError(f"unknown layout {layout!r:.40}: known is {LAYOUT!r}")
    baked = baked_weights(arch, source.kv, {t.source.name: (t.dtype, t.source.ne) for t in tensors})
    if not baked:
        raise DTypeError(f"layout {layout}: no weight is of a type that it is for, as Q4_0, Q8_0 and Q2_K to Q6_K are")
    names = {t.source.name: baked.get(t.source.name) for t in tensors}
    return [t if (s := names[t.source.name]) is None else replace(t, stored=s, packed=True) for t in tensors]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.lower())
    except re.error as e:
        raise DTypeError(f"{text!r} is no regular expression: {e}") from None


def _file_type_of(tensors: list[TensorPlan]) -> int:
    """The file type for the tensor type that most elements have."""
    sizes: dict[DType, int] = {}
    for t in tensors:
        sizes[t.dtype] = sizes.get(t.dtype, 0) + math.prod(t.source.ne)
    most = max(sizes, key=lambda dtype: sizes[dtype], default=DType.F32)
    return next((mix.file_type for mix in MIXES.values() if mix.base is most), MIXES["F16"].file_type)


def write_quantized(
    plan: RewritePlan,
    path: str | os.PathLike[str],
    n_threads: int | None = None,
    progress: Progress | None = None,
    split_size: int | None = None,
) -> list[str]:
    """Write the new file; returns its name. It appears at `path` when it is complete; until then, and after a failure,
    a file that was there before stays.

    Metadata stays the same, except `general.file_type` and `general.quantization_version`. A model in several files
    becomes one file. With `split_size` it is written in parts with at most that many bytes of tensors, see
    `split_tensors`; then the names of the parts are returned.
    Raises GGUFError when the output is the source, cannot be written, or a weight has no value in its new type.
    """
    out = os.fspath(path)
    alignment, prefix = plan.source.alignment, prefix_of(out)
    replaced = [_FILE_TYPE_KEY, _VERSION_KEY, *SPLIT_KEYS]
    own = [kv_record(_VERSION_KEY, _QUANTIZATION_VERSION), kv_record(_FILE_TYPE_KEY, plan.file_type)]
    packed = [(t.source.name, t.dtype, t.source.ne) for t in plan.tensors if t.packed]
    if packed:
        alignment = max(alignment, ALIGNMENT)
        replaced.append(ALIGNMENT_KEY)
        own += [kv_record(ALIGNMENT_KEY, np.uint32(alignment)), *layout_records(packed)]
    kv = plan.source.records(replaced) + own
    infos = [info for t in plan.tensors for info in t.infos]
    parts = [infos] if split_size is None else split_tensors(infos, alignment, split_size, None)
    paths = [out] if split_size is None else [part_path(prefix, i, len(parts)) for i in range(len(parts))]
    for name in paths:
        plan.source.refuse_output(name)
    total = plan.n_elements
    done = 0
    try:
        with (
            GGUFOut(out, kv, infos, alignment) if split_size is None else SplitOut(prefix, kv, parts, alignment)
        ) as gguf:
            for t in plan.tensors:

                def chunks(pieces: Iterator[tuple[int, Bytes]]) -> Iterator[Bytes]:
                    nonlocal done
                    for n, data in pieces:
                        yield data
                        done += n
                        if progress is not None:
                            progress(done, total)

                if t.stored:
                    gguf.write_tensor(chunks(_convert(plan.source, t, n_threads)))
                if t.packed:
                    again = replace(t, error=None) if t.stored else t
                    pieces = packed_pieces(t.dtype, t.source.ne, _convert(plan.source, again, n_threads))
                    gguf.write_tensor(chunks((0 if t.stored else n, data) for n, data in pieces))
    except OSError as e:
        raise GGUFError(f"{out}: cannot be written: {e.strerror}") from e
    return paths


def _convert(source: Source, t: TensorPlan, n_threads: int | None) -> Iterator[tuple[int, Bytes]]:
    """The stored bytes of the new tensor in pieces of some rows, each with its number of elements. Threads convert one
    piece each, some pieces ahead, so that reading and writing need not wait."""
    n, per_matrix, row = t.source.ne[0], t.source.ne[1], 0
    if t.dtype is t.source.dtype:
        for piece in source.rows(t.source.name, _CHUNK):
            if t.error is not None:
                t.error.n += len(piece) * n
            yield len(piece) * n, piece
        return
    workers = thread_count(n_threads)
    ahead: deque[Future[tuple[Bytes, TensorError | None]]] = deque()

    def oldest() -> tuple[int, Bytes]:
        stored, error = ahead.popleft().result()
        if t.error is not None and error is not None:
            t.error.include(error)
        return len(stored) * n, stored

    with ThreadPool(workers) as pool:
        try:
            for piece in source.rows(t.source.name, _CHUNK):
                weights = None if t.weights is None else t.weights[row // per_matrix % len(t.weights)]
                row += len(piece)
                ahead.append(pool.submit(_convert_piece, t, piece, weights))
                if len(ahead) > 2 * workers:
                    yield oldest()
            while ahead:
                yield oldest()
        finally:
            for job in ahead:
                job.cancel()


def _convert_piece(t: TensorPlan, piece: Bytes, weights: Floats | None) -> tuple[Bytes, TensorError | None]:
    x = dequantize(piece, t.source.dtype, n_threads=1)
    _check_values(t.source.name, x, t.dtype)
    stored = quantize(x, t.dtype, weights, n_threads=1)
    error = None
    if t.error is not None:
        error = TensorError()
        error.add(x, dequantize(stored, t.dtype, n_threads=1))
    return stored, error


def _check_source(t: SourceTensor, allow_requantize: bool) -> None:
    if t.dtype.is_quantized and not allow_requantize:
        raise DTypeError(f"tensor {t.name}: requantizing from type {t.dtype.name} is disabled (see --allow-requantize)")
    if not t.dtype.is_quantized and t.dtype not in (DType.F32, DType.F16, DType.BF16):
        raise DTypeError(f"tensor {t.name}: cannot convert tensor type {t.dtype.name}")


def _weights_of(t: SourceTensor, imatrix: Imatrix | None) -> Floats | None:
    found = None if imatrix is None else imatrix.get(t.name)
    if found is None:
        return None  # it saw no input while the matrix was measured
    if found.size == t.ne[0] * t.ne[2]:
        return found.reshape(t.ne[2], t.ne[0])
    if t.name == "token_embd.weight":
        return None  # llama.cpp also goes on without a matrix
    raise ShapeError(f"imatrix size {found.size} is different from tensor size {t.ne[0] * t.ne[2]} for {t.name}")


def _wants_imatrix(name: str, dtype: DType, mix: Mix) -> bool:
    """Whether llama.cpp refuses to quantise this tensor without an importance matrix."""
    if name in ("token_embd.weight", "output.weight"):
        return False
    return dtype in _FEW_BITS or (dtype is DType.Q2_K and mix is MIXES["Q2_K_S"])


def _check_values(name: str, x: Floats, dtype: DType) -> None:
    if dtype is DType.F32:
        return
    largest = float(np.max(np.abs(x), initial=0.0))
    if not math.isfinite(largest):
        raise GGUFError(f"tensor {name}: a weight is not a finite number")
    if dtype is DType.F16 and largest > _F16_MAX:
        raise GGUFError(f"tensor {name}: the weight {largest:g} is too large for F16")
