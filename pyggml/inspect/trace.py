"""Traces: the values of named nodes of a run, to be kept in a file or compared with another run."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pyggml import limits
from pyggml.codec import Array
from pyggml.errors import GGMLError, GGUFError, GraphError, ModelError, path_name
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.llm.batch import Batch, token_ids
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions
from pyggml.signature import hands_on, keywords_of
from pyggml.small_file import open_regular, parse_json

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MANIFEST = "manifest.json"
_HEADERS: dict[tuple[int, int], Callable[[io.BytesIO], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_SCORES = ("kq", "kq_scaled", "kq_tanh", "kq_soft_max_ext")  # their rows have n_kv numbers


@dataclass(eq=False)
class Trace:
    """The values of a run's nodes by name, in the graph's order; arrays in NumPy order. `about` describes the run."""

    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    about: dict[str, Any] = field(default_factory=dict[str, Any])


@hands_on(*keywords_of(Model.new_context))
def trace(model: Model, prompt: str | Sequence[int], *patterns: str, **options: Unpack[ContextOptions]) -> Trace:
    """Evaluate `prompt` (text, or token ids) in one batch with logits for all tokens, and keep the nodes whose names
    match (default: all). `options` as for `Model.new_context`.

    Raises GraphError when no node matches; ModelError for n_batch or n_ubatch, which follow from the prompt; and what
    decoding raises.
    """
    kept = Trace()
    ids = _walk(model, prompt, patterns, lambda name, x: kept.arrays.update({name: np.array(x)}), options)
    shown = {name: str(getattr(value, "name", value)) for name, value in options.items()}
    kept.about = {"model": model.path, "arch": model.arch, "tokens": ids, "options": shown}
    return kept


def _walk(
    model: Model,
    prompt: str | Sequence[int],
    patterns: tuple[str, ...],
    see: Callable[[str, Array], object],
    options: ContextOptions,
) -> list[int]:
    """Evaluate a prompt once, call `see` with each matching node in order, and return the token ids."""
    ids = model.tokenize(prompt) if isinstance(prompt, str) else [int(i) for i in token_ids(prompt)]
    n = max(len(ids), 1)
    sizes = one_ubatch(n, options)
    seen: list[str] = []

    def note(name: str, x: Array) -> None:
        seen.append(name)
        see(name, x)

    with model.new_context(n, **{**options, **sizes}) as ctx, model.tap(*(patterns or ("*",)), callback=note):
        ctx.decode(with_all_logits(ids))
    if not seen:
        raise no_such_node(model, patterns)
    return ids


def one_ubatch(n: int, options: ContextOptions) -> ContextOptions:
    """Options with which `n` tokens are evaluated at once. Raises ModelError when `options` contradict that."""
    taken = [name for name in ("n_batch", "n_ubatch") if name in options]
    if taken:
        raise ModelError(f"all tokens are one ubatch: {' and '.join(taken)} cannot be given")
    return {"n_batch": n, "n_ubatch": n}


def with_all_logits(ids: Sequence[int]) -> Batch:
    """A prompt that asks for logits of all tokens, so that the last layer, too, has a row for each token."""
    batch = Batch.prompt(ids)
    batch.logits = [True] * len(batch)
    return batch


def no_such_node(model: Model, patterns: tuple[str, ...]) -> GraphError:
    """The error about patterns that match no node."""
    return GraphError(f"no node of {model.arch} is called {' or '.join(patterns)}; dump-dot shows them")


def save_trace(t: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as .npz: an array for each node, and `manifest.json` with `about` and the order of the nodes.

    The file appears whole or not at all. Raises OSError.
    """
    with AtomicFile(path) as out, zipfile.ZipFile(out.file, "w", zipfile.ZIP_STORED, allowZip64=True) as z:
        z.writestr(_MANIFEST, json.dumps({**t.about, "nodes": list(t.arrays)}))
        for name, x in t.arrays.items():
            with z.open(f"{name}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array(f, x, allow_pickle=False)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a file of `save_trace`, or any .npz whose arrays have the names of nodes (hidden states of another library,
    say). Raises GGUFError for a file that is not such an archive, or that unpacks to more than `limits.TRACE_BYTES`
    and `TRACE_RATIO` allow; OSError."""
    name = path_name(path, GGUFError)
    with open_regular(name, GGUFError) as file:
        most = max(limits.TRACE_BYTES, limits.TRACE_RATIO * os.fstat(file.fileno()).st_size)
        try:
            with zipfile.ZipFile(file) as z:
                size = sum(entry.file_size for entry in z.infolist())
                if size > most:
                    raise GGUFError(f"it unpacks to {size} bytes: up to {most} are read (pyggml.limits.TRACE_BYTES)")
                return _read_entries(z)
        except GGMLError as e:
            raise GGUFError(f"{name} is no trace: {e}") from None
        except Exception as e:  # zipfile, zlib and NumPy raise many kinds
            raise GGUFError(f"{name} is no trace: it is damaged ({type(e).__name__}: {e})") from None


def _read_entries(z: zipfile.ZipFile) -> Trace:
    t = Trace()
    entries = set(z.namelist())
    names = [n.removesuffix(".npy") for n in z.namelist() if n.endswith(".npy")]
    if _MANIFEST in entries:
        about = parse_json(_MANIFEST, z.read(_MANIFEST), GGUFError)
        t.about = cast("dict[str, Any]", about) if isinstance(about, dict) else {}
        nodes, tokens = t.about.pop("nodes", None), t.about.get("tokens", [])
        if not _is_list_of(str, nodes):
            raise GGUFError(f"{_MANIFEST} has no list of nodes")
        if not _is_list_of(int, tokens):
            raise GGUFError(f"the tokens of {_MANIFEST} are no list of token ids")
        names = cast("list[str]", nodes)
    for name in dict.fromkeys(names):
        if f"{name}.npy" not in entries:
            raise GGUFError(f"the array of {name:.80} is missing")
        t.arrays[name] = _read_array(name, z.read(f"{name}.npy"))
    return t


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(x) is kind for x in cast("list[object]", value))


def _read_array(name: str, data: bytes) -> Array:
    """Read an array of real numbers in NumPy's format. Its header is not trusted beyond what `data` holds."""
    f = io.BytesIO(data)
    read = _HEADERS[np.lib.format.read_magic(f)]
    shape, fortran, dtype = read(f)
    if dtype.kind not in "fiu":
        raise GGUFError(f"{name:.80} is of type {dtype}")
    n = math.prod(shape)
    if n * dtype.itemsize != len(data) - f.tell() or min(shape, default=0) < 0:
        raise GGUFError(f"{name:.80} of shape {shape} has {len(data) - f.tell()} bytes")
    x: Array = np.array(np.frombuffer(data, dtype, n, f.tell()))
    return cast("Array", x.reshape(shape[::-1]).T if fortran else x.reshape(shape))


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass
class NodeDiff:
    """How node `name` of B departs from A's: `nmse` = sum (b - a)^2 / sum a^2 over what is finite in both, `max_abs`
    the largest difference; `note` says why numbers cannot be compared, and then `nmse` is infinite."""

    name: str
    nmse: float
    max_abs: float
    note: str = ""


@dataclass
class Diff:
    """The differences of nodes that A and B share, in A's order, and the names that only one of them has."""

    nodes: list[NodeDiff]
    only_a: list[str]
    only_b: list[str]
    tolerance: float

    @property
    def first(self) -> NodeDiff | None:
        """The first node beyond the tolerance; None when there is none."""
        return next((n for n in self.nodes if not n.nmse <= self.tolerance), None)

    def layers(self, of: str = "l_out") -> list[NodeDiff]:
        """The differences of the nodes `of`-0, `of`-1 ...: how the difference grows from layer to layer."""
        return [n for n in self.nodes if fnmatchcase(n.name, f"{of}-*")]


def diff(
    a: Model | Trace,
    b: Model | Trace,
    prompt: str | Sequence[int] | None = None,
    *patterns: str,
    tolerance: float = 1e-6,
    options_a: ContextOptions | None = None,
    options_b: ContextOptions | None = None,
) -> Diff:
    """Compare two runs node by node, to find the place where they part. A and B are models, which evaluate `prompt`, or
    traces; with a trace the prompt defaults to the trace's tokens. Compares the nodes that match `patterns` (default:
    all but views of caches).

    A's values are kept in memory meanwhile. Raises ModelError when there is no prompt, or it differs from a trace's;
    GraphError when A and B have no node in common; and what `trace` raises.
    """
    if not all(isinstance(side, (Model, Trace)) for side in (a, b)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"models and traces are compared, not {type(a).__name__} and {type(b).__name__}")
    if not tolerance >= 0:
        raise ModelError(f"tolerance must be at least 0, not {tolerance}")
    known = [t.about["tokens"] for t in (a, b) if isinstance(t, Trace) and "tokens" in t.about]
    prompt = known[0] if prompt is None and known else prompt
    if prompt is None and not (isinstance(a, Trace) and isinstance(b, Trace)):
        raise ModelError("a prompt is needed: neither side is a trace that tells its tokens")
    if isinstance(prompt, str):  # B gets A's ids: its file may lack a tokenizer, and both must read the same tokens
        prompt = next((m.tokenize(prompt) for m in (a, b) if isinstance(m, Model)), None)
    if any(tokens != known[0] for tokens in known) or (known and prompt is not None and list(prompt) != known[0]):
        raise ModelError("a trace is of other tokens: values at other tokens cannot be compared")
    first = a if isinstance(a, Trace) else trace(a, prompt or (), *patterns, **(options_a or {}))
    found: dict[str, NodeDiff] = {}
    only_b: list[str] = []

    def see(name: str, x: Array) -> None:
        if name in first.arrays:
            found[name] = compare(name, first.arrays[name], x)
        else:
            only_b.append(name)

    if isinstance(b, Trace):
        for name, x in b.arrays.items():
            see(name, x)
    else:
        _walk(b, prompt or (), patterns, see, options_b or {})
    wanted = [name for name in first.arrays if _compared(name, patterns)]
    nodes = [found[name] for name in wanted if name in found]
    if not nodes:
        raise GraphError(
            f"A and B have no node in common{f' that is called {chr(32).join(patterns)}' * bool(patterns)}"
        )
    return Diff(nodes, [n for n in wanted if n not in found], [n for n in only_b if _compared(n, patterns)], tolerance)


def _compared(name: str, patterns: Iterable[str]) -> bool:
    """Whether a node is compared. Views of caches are not by default: types and layouts differ, and cells are unset."""
    patterns = tuple(patterns)
    return (
        any(fnmatchcase(name, p) for p in patterns)
        if patterns
        else "cache" not in name and name[:2] not in ("k-", "v-")
    )


def compare(name: str, a: Array, b: Array) -> NodeDiff:
    """Compare the values of one node in two runs. Infinities (of masks) and NaN are equal when both runs have the same.
    If one run has more cells (n_kv), the cells that both have are compared."""
    if a.ndim == b.ndim > 1 and a.shape[:-1] == b.shape[:-1] and name.split("-")[0] in _SCORES:
        n_kv = min(a.shape[-1], b.shape[-1])
        a, b = a[..., :n_kv], b[..., :n_kv]
    if a.shape != b.shape:
        return NodeDiff(name, np.inf, np.inf, f"shapes {a.shape} and {b.shape}")
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return NodeDiff(name, np.inf, np.inf, f"{int((~finite).sum())} values are not finite in one or both")
    d, scale = y[finite] - x[finite], x[finite]
    error, size = float((d * d).sum()), float((scale * scale).sum())
    return NodeDiff(name, error / size if size else (np.inf if error else 0.0), float(np.abs(d).max(initial=0)))


def summary(d: Diff) -> Mapping[str, Any]:
    """A Diff for JSON, with null for infinities."""

    def number(x: float) -> float | None:
        return x if np.isfinite(x) else None

    def shown(n: NodeDiff) -> dict[str, Any]:
        return {"name": n.name, "nmse": number(n.nmse), "max_abs": number(n.max_abs)} | (
            {"note": n.note} if n.note else {}
        )

    first = d.first
    return {
        "equal": first is None,
        "tolerance": d.tolerance,
        "first": None if first is None else shown(first),
        "nodes": [shown(n) for n in d.nodes],
        "only_a": d.only_a,
        "only_b": d.only_b,
    }
