"""The memory planner: where each tensor of a graph lies in a compute buffer. Pure: reads a graph, returns a plan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .buffer import ALIGNMENT
from .opdef import OPS
from .tensor import FLAG_INPUT, FLAG_OUTPUT, FLAG_PLANNED, Tensor


@dataclass
class Plan:
    """Offsets of the planned tensors in their pool's buffer, and the bytes each pool needs.

    `lower_bound` is the largest sum of bytes that live at one time: no plan without in-place reuse can need less.
    """

    offsets: dict[Tensor, tuple[str, int]] = field(default_factory=dict[Tensor, tuple[str, int]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    lower_bound: int = 0
    recycled: set[Tensor] = field(default_factory=set[Tensor])  # not readable after the run


class _Pool:
    """Free intervals of one growing buffer; the best-fitting hole is taken."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (start, end), by start
        self.size = 0

    def take(self, n: int) -> int:
        fits = [(end - start, start, end) for start, end in self.free if end - start >= n]
        if fits:
            _, start, end = min(fits)
            self.free.remove((start, end))
            if end - start > n:
                insort(self.free, (start + n, end))
            return start
        start = self.size
        if self.free and self.free[-1][1] == self.size:  # the last hole touches the end: grow from there
            start = self.free.pop()[0]
        self.size = start + n
        return start

    def give(self, start: int, n: int) -> None:
        end = start + n
        i = bisect_left(self.free, (start, end))
        if i < len(self.free) and self.free[i][0] == end:
            end = self.free.pop(i)[1]
        if i > 0 and self.free[i - 1][1] == start:
            start = self.free.pop(i - 1)[0]
        insort(self.free, (start, end))


def plan(
    nodes: Sequence[Tensor],
    leafs: Iterable[Tensor],
    *,
    alignment: int = ALIGNMENT,
    size_of: Callable[[Tensor], int] = lambda t: t.nbytes,
    pool_of: Callable[[Tensor], str] = lambda t: "",
    keep: Iterable[Tensor] = (),
) -> Plan:
    """Lay out every tensor that has no memory yet.

    Inputs and outputs (and `keep`) are never recycled and never overwritten in place. A node may take over the memory
    of a source it is the last user of, where its op allows it (OpDef.inplace) and type, shape and pool agree. A view
    lives where its root lives.
    """
    result = Plan()
    pools: dict[str, _Pool] = {}
    pinned = {t.root for t in keep}
    pinned.update(t.root for t in (*leafs, *nodes) if t.flags & (FLAG_INPUT | FLAG_OUTPUT))
    users: dict[Tensor, int] = {}  # root -> uses to come
    for t in nodes:
        for s in t.src:
            if s is not None:
                users[s.root] = users.get(s.root, 0) + 1
        if t.view_src is not None:
            users[t.view_src] = users.get(t.view_src, 0) + 1
    live = 0
    held: dict[Tensor, int] = {}  # root -> bytes it occupies

    def place(t: Tensor) -> None:
        nonlocal live
        pool = pool_of(t)
        n = -(-size_of(t) // alignment) * alignment
        result.offsets[t] = (pool, pools.setdefault(pool, _Pool()).take(n))
        held[t] = n
        live += n
        result.lower_bound = max(result.lower_bound, live)

    def release(root: Tensor) -> None:
        nonlocal live
        users[root] -= 1
        if users[root] == 0 and root not in pinned and root in held and root.op != "none":
            pool, offset = result.offsets[root]
            pools[pool].give(offset, held[root])
            live -= held.pop(root)
            result.recycled.add(root)

    for t in leafs:
        if _needs_place(t):
            place(t)
    for t in nodes:
        if _needs_place(t):
            heir = _heir(t, users, pinned, held, result, pool_of)
            if heir is None:
                place(t)
            else:
                result.offsets[t] = result.offsets[heir]
                held[t] = held.pop(heir)
                result.recycled.add(heir)
            users.setdefault(t, 0)
        for s in t.src:
            if s is not None:
                release(s.root)
        if t.view_src is not None:
            release(t.view_src)
    result.sizes = {name: pool.size for name, pool in pools.items()}
    return result


def _needs_place(t: Tensor) -> bool:
    return t.view_src is None and (t.buffer is None or bool(t.flags & FLAG_PLANNED))


def _heir(
    t: Tensor,
    users: dict[Tensor, int],
    pinned: set[Tensor],
    held: dict[Tensor, int],
    result: Plan,
    pool_of: Callable[[Tensor], str],
) -> Tensor | None:
    """The source whose memory `t` may take over, or None."""
    if t in pinned:
        return None
    for i in OPS[t.op].inplace:
        s = t.src[i] if i < len(t.src) else None
        if s is None or s.view_src is not None or s in pinned or s not in held or s.op == "none":
            continue
        uses_here = sum(1 for other in t.src if other is not None and other.root is s)
        if (
            users[s] == uses_here == 1
            and s.dtype is t.dtype
            and s.nb == t.nb
            and s.ne == t.ne
            and result.offsets[s][0] == pool_of(t)
        ):
            return s
    return None
