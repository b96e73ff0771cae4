"""HTML for notebooks: tensors with their values, and plans as maps of memory over time."""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import numpy as np

from ..buffers.alloc import Plan
from ..codec import Array
from ..errors import GGMLError
from ..opdef import OPS
from ..tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor, shown
from ..var import largest
from .picture import parameters
from .values import Values, first_rows, values_of

_INK, _BAR, _BLUE, _RED, _PALE = "currentColor", "#4878d0", (33, 102, 192), (200, 60, 40), (245, 245, 240)
_COLOURS = (
    "#6fa8f5",
    "#f2a65e",
    "#7fc97a",
    "#e57f86",
    "#b39ddb",
    "#c9a98b",
    "#ef9fd0",
    "#b9c24d",
    "#5ec6cf",
    "#a8b3c2",
)


def _table(rows: list[tuple[str, str]]) -> str:
    cell = 'style="text-align:left;padding:1px 10px 1px 0"'
    body = "".join(f"<tr><td {cell}>{escape(k)}</td><td {cell}><code>{escape(v)}</code></td></tr>" for k, v in rows)
    return f"<table>{body}</table>"


def tensor_html(t: Tensor) -> str:
    """A tensor as an HTML fragment: its shape in both orders, strides and type. If it has values: their statistics, a
    histogram, and the first plane [ne1, ne0] as an image (blue below zero, red above)."""
    flags = [name for flag, name in ((FLAG_INPUT, "input"), (FLAG_OUTPUT, "output")) if t.flags & flag]
    if t.op != "none":
        flags.append(OPS[t.op].label if not parameters(t) else f"{OPS[t.op].label} {parameters(t)}")
    rows = [
        ("ne, nb (bytes)", f"{list(t.ne)}, {list(t.nb)}"),
        ("shape, strides", f"{t.shape}, {t.strides}" + ("" if t.is_contiguous else " (not contiguous)")),
        ("type", f"{t.dtype.name}, {t.nbytes} bytes"),
        ("what", ", ".join(flags) or "leaf"),
    ]
    if t.view_src is not None:
        rows.append(("view", f"of {t.view_src.name or 'a tensor'} at byte {t.view_offs}"))
    try:
        x = first_rows(t)
    except GGMLError as e:
        why = str(e).splitlines()[0]
        return f"<div><b>{escape(shown(t.name) or t.op)}</b>{_table([*rows, ('values', why)])}</div>"
    v = values_of(x)
    part = "" if v.n == int(t.n_elements) else f" (of the first {v.n} elements)"
    odd = "".join(f", {n} {what}" for n, what in ((v.n_nan, "NaN"), (v.n_inf, "infinite")) if n)
    rows.append(("values", f"{v}  std {v.std:.4g}{odd}{part}"))
    return f"<div><b>{escape(shown(t.name) or t.op)}</b>{_table(rows)}{_histogram(v)} {_image(v)}</div>"


def _histogram(v: Values) -> str:
    most = max(1, *v.histogram)
    bars = "".join(
        f'<rect x="{6 * i}" y="{60 - 58 * n / most:.1f}" width="5" height="{58 * n / most:.1f}">'
        f"<title>{n}</title></rect>"
        for i, n in enumerate(v.histogram)
    )
    ends = f'<text x="0" y="73">{v.low:.3g}</text><text x="192" y="73" text-anchor="end">{v.high:.3g}</text>'
    return (
        f'<svg width="192" height="76" font-size="10" font-family="sans-serif"><g fill="{_BAR}">{bars}</g>'
        f'<g fill="{_INK}">{ends}</g></svg>'
    )


def _image(v: Values) -> str:
    rows, columns = v.pixels.shape
    size = f"width:{max(24, 5 * columns)}px;height:{max(24, 5 * rows)}px;image-rendering:pixelated;vertical-align:top"
    data = base64.b64encode(_png(_shades(v))).decode()
    return f'<img alt="" src="data:image/png;base64,{data}" style="{size}"/>'


def _shades(v: Values) -> Array:
    """RGB of the pixels: paler towards zero; grey for a pixel without finite values."""
    x = v.low + (v.pixels.astype(np.float64) - 1) / 254 * (v.high - v.low)
    far = max(abs(v.low), abs(v.high), 1e-300)
    part = np.sqrt(np.minimum(1, np.abs(x) / far))[..., None]
    ends = np.where(x[..., None] < 0, _BLUE, _RED)
    rgb: Array = np.where(v.pixels[..., None] > 0, _PALE + (ends - np.array(_PALE)) * part, 128)
    return np.asarray(np.round(rgb), np.uint8)


def _png(rgb: Array) -> bytes:
    """A PNG of uint8 [rows, columns, 3]."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns, _ = rgb.shape
    lines = b"".join(b"\0" + row.tobytes() for row in rgb)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def plan_html(plan: Plan) -> str:
    """A plan as an HTML fragment: a map for each pool, with steps to the right and bytes downwards. A tensor is a box
    over the steps and bytes that it takes; hovering shows names and numbers."""
    total = sum(plan.sizes.values())
    least = f", at least {plan.lower_bound} live at one time" if plan.lower_bound else ""
    parts = [f"<b>{len(plan.offsets)} tensors in {total} bytes{least}; {plan.n_steps} steps</b>"]
    for pool, size in plan.sizes.items():
        parts.append(f"<br/>{escape(pool) or 'pool'}: {size} bytes{_map(plan, pool, size)}")
    return f"<div>{''.join(parts)}</div>"


def _map(plan: Plan, pool: str, size: int) -> str:
    width, height, colours = 960, 200, {op: _COLOURS[i % len(_COLOURS)] for i, op in enumerate(_ops(plan))}
    boxes: list[str] = []
    for t, (where, offset) in plan.offsets.items():
        if where != pool or t not in plan.lives:
            continue
        first, last = plan.lives[t]
        x, w = width * first / max(1, plan.n_steps), width * (last + 1 - first) / max(1, plan.n_steps)
        y, h = height * offset / max(1, size), height * largest(t.nbytes) / max(1, size)
        name = shown(t.name) or t.op
        text = escape(f"{name} ({t.op}): {t.nbytes} bytes at {offset}, steps {first} to {last}")
        boxes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(0.5, w - 0.5):.2f}" height="{max(0.5, h - 0.5):.2f}"'
            f' fill="{colours[t.op]}"><title>{text}</title></rect>'
        )
        if w > 7 * len(name) and h > 11:
            boxes.append(f'<text x="{x + 3:.2f}" y="{y + h / 2 + 3.5:.2f}" pointer-events="none">{escape(name)}</text>')
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" style="max-width:{width}px;display:block;'
        f'border:1px solid #8888" font-size="10" font-family="sans-serif">{"".join(boxes)}</svg>'
    )


def _ops(plan: Plan) -> list[str]:
    return list(dict.fromkeys(t.op for t in plan.offsets))
