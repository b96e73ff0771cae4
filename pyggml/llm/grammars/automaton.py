"""Regular parts of a grammar as Glushkov automata, and questions about pairs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from .effort import Effort
from .nodes import Alt, Chars, Node, Ranges, Ref, Rep, Rules, Seq, overlap, ranges

LARGEST = 4000  # positions; a node with more is too large for one lexeme
_EXACT = 256  # positions up to which repetitions are unrolled; larger ones are taken for "any number of times"


@dataclass
class Automaton:
    """The positions of a node: the characters each matches, which come first and last, and which follow each. The
    automaton may match more than its node, because it only serves to prove that something cannot happen."""

    chars: list[Ranges] = field(default_factory=list[Ranges])
    follow: list[set[int]] = field(default_factory=list[set[int]])
    first: set[int] = field(default_factory=set[int])
    last: set[int] = field(default_factory=set[int])

    @cached_property
    def later(self) -> Ranges:
        """The characters that a text may have behind its first one."""
        return ranges(r for p in set[int]().union(*self.follow) for r in self.chars[p])

    @cached_property
    def widest(self) -> int:
        """The largest number of ranges that one position matches."""
        return max(map(len, self.chars), default=1)


class Sizes:
    """Counts the positions of nodes that name no recursive rule; counting stops above LARGEST."""

    def __init__(self, rules: Rules, unrolled: bool) -> None:
        self._rules, self._unrolled = rules, unrolled
        self._of_rules: dict[str, int] = {}

    def size(self, node: Node) -> int:
        """How many positions a node has."""
        match node:
            case Chars():
                return 1
            case Ref(name):
                if name not in self._of_rules:
                    self._of_rules[name] = self.size(self._rules[name])
                return self._of_rules[name]
            case Rep(item, low, high):
                return min(self.size(item) * (max(low, high or 1, 1) if self._unrolled else 1), LARGEST + 1)
            case Seq(items) | Alt(items):
                n = 0
                for item in items:
                    n += self.size(item)
                    if n > LARGEST:
                        break
                return n
            case _:
                return 0


def automaton(node: Node, rules: Rules, sizes: Sizes, effort: Effort) -> Automaton:
    """The automaton of a node that names no recursive rule and has no token. `sizes` counts the positions of nodes."""
    a = Automaton()
    unroll = sizes.size(node) <= _EXACT

    def build(node: Node) -> tuple[set[int], set[int], bool]:
        match node:
            case Chars(chars):
                effort.spend(len(chars))
                a.chars.append(chars)
                a.follow.append(set())
                only = {len(a.chars) - 1}
                return only, only, False
            case Ref(name):
                return build(rules[name])
            case Alt(items):
                parts = [build(item) for item in items]
                first = set[int]().union(*(first for first, _, _ in parts))
                last = set[int]().union(*(last for _, last, _ in parts))
                return first, last, any(empty for _, _, empty in parts)
            case Seq(items):
                return chain([build(item) for item in items])
            case Rep(item, low, high) if unroll and high is not None:
                parts = [build(item) for _ in range(high)]
                if any(empty for _, _, empty in parts):
                    return chain([(first, last, True) for first, last, _ in parts])
                for (_, last, _), (first, _, _) in pairwise(parts):
                    join(last, first)
                return parts[0][0], set[int]().union(*(last for _, last, _ in parts[max(low - 1, 0) :])), low == 0
            case Rep(item, low, high) if unroll and low > 1:
                parts = [build(item) for _ in range(low)]
                join(parts[-1][1], parts[-1][0])
                return chain(parts)
            case Rep(item, low, _):
                first, last, empty = build(item)
                join(last, first)
                return first, last, empty or low == 0
            case _:
                raise AssertionError("a token is no part of a lexeme")

    def join(last: set[int], first: set[int]) -> None:
        effort.spend(len(last) * (1 + len(first) // 4))
        for p in last:
            a.follow[p] |= first

    def chain(parts: list[tuple[set[int], set[int], bool]]) -> tuple[set[int], set[int], bool]:
        first, last, empty = set[int](), set[int](), True
        for part in parts:
            join(last, part[0])
            effort.spend((len(first) + len(last)) // 4)
            first = first | part[0] if empty else first
            last = last | part[1] if part[2] else part[1]
            empty = empty and part[2]
        return first, last, empty

    a.first, a.last, _ = build(node)
    return a


def shared_word(a: Automaton, b: Automaton, effort: Effort) -> bool:
    """Whether a text may exist that both match."""
    return any(p in a.last and q in b.last for p, q in _pairs(a, b, effort))


def goes_on(a: Automaton, b: Automaton, then: Ranges, effort: Effort) -> bool:
    """Whether a text of `b` may begin with a text of `a` and a character of `then`."""
    effort.spend(1 + len(b.later) + len(then))
    if not overlap(b.later, then):  # true of most pairs
        return False
    return any(p in a.last and any(overlap(b.chars[r], then) for r in b.follow[q]) for p, q in _pairs(a, b, effort))


def _pairs(a: Automaton, b: Automaton, effort: Effort) -> set[tuple[int, int]]:
    """The pairs of positions that the two automata may reach by the same text."""
    widest = a.widest + b.widest
    effort.spend(len(a.first) * len(b.first) * widest)
    todo = [(p, q) for p in a.first for q in b.first if overlap(a.chars[p], b.chars[q])]
    seen = set(todo)
    while todo:
        p, q = todo.pop()
        effort.spend(1 + len(a.follow[p]) * len(b.follow[q]) * widest)
        for r in a.follow[p]:
            for s in b.follow[q]:
                if (r, s) not in seen and overlap(a.chars[r], b.chars[s]):
                    seen.add((r, s))
                    todo.append((r, s))
    return seen
