"""The nodes of a grammar. They are compared by identity, because each is one place in the grammar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LAST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # code points that are not characters
Ranges = tuple[tuple[int, int], ...]  # (first, last) code points; ascending, with gaps between them


def ranges(parts: Iterable[tuple[int, int]], negated: bool = False) -> Ranges:
    """The characters of some ranges, or all other characters. A range that ends before it begins is empty."""
    merged: list[list[int]] = []
    for low, high in sorted(p for p in parts if p[0] <= p[1]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if not negated:
        return tuple((low, high) for low, high in merged if not SURROGATES[0] <= low <= high <= SURROGATES[1])
    edges = [-1, *(x for pair in merged for x in pair), LAST_CHAR + 1]
    return ranges((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2))


def overlap(a: Ranges, b: Ranges) -> bool:
    """Whether two sets share a character."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] < b[j][0]:
            i += 1
        elif b[j][1] < a[i][0]:
            j += 1
        else:
            return True
    return False


def same_first_byte(a: Ranges) -> Ranges:
    """These characters, and all others whose UTF-8 begins with the same byte. When a character ends a lexeme, the lexer
    has seen only its first byte."""
    spans: list[tuple[int, int]] = []
    for first, end, block in ((0, 0x80, 1), (0x80, 0x800, 0x40), (0x800, 0x10000, 0x1000), (0x10000, 1 << 21, 1 << 18)):
        parts = [(max(low, first), min(high, end - 1)) for low, high in a if low < end and high >= first]
        spans += [
            (max(low // block * block, first), min(high // block * block + block, end) - 1) for low, high in parts
        ]
    return ranges((low, min(high, LAST_CHAR)) for low, high in spans)


@dataclass(frozen=True, eq=False)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Seq:
    """Items one after the other; without items, the empty text."""

    items: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Alt:
    """Any one of the items; without items, nothing matches."""

    items: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Rep:
    """An item repeated `low` to `high` times (None: any number)."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, eq=False)
class Ref:
    """A rule by name."""

    name: str
    at: int = 0  # index in the text of the grammar


@dataclass(frozen=True, eq=False)
class TokenLeaf:
    """One token, or any token but that one, whatever its text."""

    id: int
    negated: bool = False


Node = Chars | Seq | Alt | Rep | Ref | TokenLeaf
Rules = dict[str, Node]


def literal(text: Iterable[int]) -> Node:
    """The node of a given text."""
    return seq(Chars(ranges([(c, c)])) for c in text)


def seq(items: Iterable[Node]) -> Node:
    """A `Seq` of the items, or the item when there is one."""
    flat = [part for item in items for part in (item.items if isinstance(item, Seq) else (item,))]
    if any(is_never(item) for item in flat):
        return Alt()
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(items: Iterable[Node]) -> Node:
    """An `Alt` of the items without those that never match; the empty text makes the other items optional."""
    flat = [part for item in items for part in (item.items if isinstance(item, Alt) else (item,))]
    some = [item for item in flat if not is_never(item) and not _is_empty(item)]
    if len(some) < len(flat) and any(map(_is_empty, flat)):
        return rep(alt(some), 0, 1) if some else Seq()
    return some[0] if len(some) == 1 else Alt(tuple(some))


def rep(item: Node, low: int, high: int | None) -> Node:
    """A `Rep` of the item, or something simpler that matches the same."""
    if is_never(item):
        return Seq() if low == 0 else item
    if high == 0 or _is_empty(item):
        return Seq()
    return item if low == high == 1 else Rep(item, low, high)


def is_never(node: Node) -> bool:
    """Whether the node matches nothing."""
    return (isinstance(node, Alt) and not node.items) or (isinstance(node, Chars) and not node.ranges)


def _is_empty(node: Node) -> bool:
    return isinstance(node, Seq) and not node.items


def children(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is made of. A `Ref` has none: the rule is not a part of it."""
    if isinstance(node, (Seq, Alt)):
        return node.items
    return (node.item,) if isinstance(node, Rep) else ()
