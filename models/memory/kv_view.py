"""The cells of a KV cache as a small picture: text for terminals, SVG in HTML for notebooks."""

from __future__ import annotations

from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .kv_cells import EMPTY, SHARED, KVCells

_WIDTH, _ROWS = 64, 16  # characters per line, lines at most
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_EMPTY, _SHARED, _PARTLY, _OTHER = ".", "+", ":", "#"
_COLORS = ("#4878a8", "#d1813f", "#5d9e5a", "#b8504e", "#8a6bb0", "#8c6d5e", "#d08ab8", "#7f7f7f", "#b0a83c", "#4fa9b5")
_SHARED_COLOR, _EMPTY_COLOR = "#333333", "#eeeeee"


def text(cells: KVCells) -> str:
    """Counts, a line for each sequence in use, and a map: each character is a cell (or several, in a large cache)."""
    per = -(-cells.size // (_WIDTH * _ROWS))
    lines = [f"{_counts(cells)}, head {cells.head}, n_kv {cells.n_kv()}", *_sequences(cells)]
    if cells.has_shift:
        lines.append("  positions were changed: K is roped again before the next step")
    symbols = _symbols(cells, per)
    for i in range(0, len(symbols), _WIDTH):
        lines.append(f"{i * per:7d} |{symbols[i : i + _WIDTH]}|")
    each = "one character is a cell" if per == 1 else f"one character is {per} cells, {_PARTLY} partly empty"
    many = f", {_OTHER} one from {len(_DIGITS)} on" if cells.n_seq_max > len(_DIGITS) else ""
    lines.append(f"{each}: {_EMPTY} empty, a digit or letter its sequence{many}, {_SHARED} several sequences")
    return "\n".join(lines)


def html(cells: KVCells, title: str) -> str:
    """The same as an HTML fragment: a bar of runs of cells, colours for sequences, what a run holds on hover."""
    label, runs = cells.owner, _runs(cells)
    width = 960.0 / cells.size
    rects: list[str] = []
    for a, b in runs:
        k = int(label[a])
        color = _EMPTY_COLOR if k == EMPTY else _SHARED_COLOR if k == SHARED else _COLORS[k % len(_COLORS)]
        rects.append(
            f'<rect x="{a * width:.2f}" y="0" width="{(b - a) * width:.2f}" height="24" fill="{color}">'
            f"<title>{escape(_describe(cells, a, b))}</title></rect>"
        )
    lines = "<br>".join(escape(s.strip()) for s in (_counts(cells), *_sequences(cells)))
    svg = f'<svg viewBox="0 0 960 24" width="100%" height="24" preserveAspectRatio="none">{"".join(rects)}</svg>'
    return f"<div><b>{escape(title)}</b><br>{lines}<br>{svg}</div>"


def holes(cells: KVCells) -> list[tuple[int, int]]:
    """Runs of empty cells before the last one in use: (first, one past the last)."""
    return [(a, b) for a, b in _runs_of(cells.pos[: cells.end] < 0) if cells.pos[a] < 0]


def _counts(cells: KVCells) -> str:
    found = holes(cells)
    n = sum(b - a for a, b in found)
    text = f"{cells.used} of {cells.size} cells in use, {len(found)} hole{'' if len(found) == 1 else 's'}"
    return text + (f" of {n} cells in all" if found else "")


def _sequences(cells: KVCells) -> list[str]:
    lines: list[str] = []
    for s in np.flatnonzero(cells.pos_max >= 0).tolist():
        owners = cells.owner[cells.members.cells_of(s)]
        shared = np.count_nonzero(owners == SHARED)
        also = f", {shared} of them shared" if shared else ""
        lines.append(f"  seq {s}: {len(owners)} cells, positions {cells.seq_pos_min(s)}..{cells.seq_pos_max(s)}{also}")
    return lines


def _symbols(cells: KVCells, per: int) -> str:
    symbols: list[str] = []
    for i in range(0, cells.size, per):
        kinds = set(cells.owner[i : i + per].tolist())
        used = kinds - {EMPTY}
        if not used:
            symbols.append(_EMPTY)
        elif len(kinds) > len(used):
            symbols.append(_PARTLY)
        elif len(used) > 1 or SHARED in used:
            symbols.append(_SHARED)
        else:
            (s,) = used
            symbols.append(_DIGITS[s] if s < len(_DIGITS) else _OTHER)
    return "".join(symbols)


def _runs(cells: KVCells) -> list[tuple[int, int]]:
    """Runs of cells of the same sequences."""
    seq = cells.seq
    change = (seq[:, 1:] != seq[:, :-1]).any(axis=0)
    cuts = [0, *(np.flatnonzero(change) + 1).tolist(), cells.size]
    return list(pairwise(cuts))


def _runs_of(values: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


def _describe(cells: KVCells, a: int, b: int) -> str:
    where = f"cell {a}" if b == a + 1 else f"cells {a}..{b - 1}"
    ids = np.flatnonzero(cells.members.of([a])).tolist()
    if not ids:
        return f"{where}: empty"
    pos = cells.pos[a:b]
    return f"{where}: sequence {', '.join(map(str, ids))}, positions {pos.min()}..{pos.max()}"
