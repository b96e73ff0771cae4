"""Simplify rules: leave out what matches nothing, and turn recursion at the end of a rule into repetition."""

from __future__ import annotations

from collections.abc import Callable

from .effort import Effort
from .nodes import Alt, Chars, Node, Ranges, Ref, Rep, Rules, Seq, alt, children, is_never, ranges, rep, seq


def simplified(rules: Rules, effort: Effort) -> Rules:
    """The rules that `root` needs, simplified. A `root` that matches nothing becomes `Alt()`."""
    productive = _productive(rules, effort)
    rules = {name: _without(node, productive) for name, node in rules.items()}
    rules = {name: _unrolled(name, node) for name, node in rules.items()}
    needed, todo = {"root"}, ["root"]
    while todo:
        for name in references(rules[todo.pop()]) - needed:
            needed.add(name)
            todo.append(name)
    return {name: _factored(node) for name, node in rules.items() if name in needed}


def references(node: Node) -> set[str]:
    """The rules that a node names."""
    if isinstance(node, Ref):
        return {node.name}
    return set[str]().union(*map(references, children(node)))


def holding(rules: Rules, holds: Callable[[Node, set[str]], bool], effort: Effort) -> set[str]:
    """The smallest set of rules that contains every rule for whose node `holds(node, set)` is true."""
    found: set[str] = set()
    names, n = list(rules), -1
    while n < len(found):
        n = len(found)
        names = [name for name in reversed(names) if name not in found]  # most rules stand before those they name
        effort.spend(len(names))
        for name in names:
            if holds(rules[name], found):
                found.add(name)
    return found


def _matches(node: Node, names: set[str], leaf: Callable[[Node], bool]) -> bool:
    """Whether a node matches a text of some kind, given that the rules `names` do, and the leaves for which `leaf` is
    true."""
    match node:
        case Seq(items):
            return all(_matches(item, names, leaf) for item in items)
        case Alt(items):
            return any(_matches(item, names, leaf) for item in items)
        case Rep(item, low, _):
            return low == 0 or _matches(item, names, leaf)
        case Ref(name):
            return name in names
        case _:
            return leaf(node)


def nullable(node: Node, names: set[str]) -> bool:
    """Whether a node matches the empty text, given that the rules `names` do."""
    return _matches(node, names, lambda _: False)


def _productive(rules: Rules, effort: Effort) -> set[str]:
    return holding(rules, lambda node, names: _matches(node, names, lambda leaf: not is_never(leaf)), effort)


def _without(node: Node, productive: set[str]) -> Node:
    match node:
        case Seq(items):
            return seq([_without(item, productive) for item in items])
        case Alt(items):
            return alt([_without(item, productive) for item in items])
        case Rep(item, low, high):
            return rep(_without(item, productive), low, high)
        case Ref(name) if name not in productive:
            return Alt()
        case _:
            return node


def _factored(node: Node) -> Node:
    """A node that matches the same texts and names the shared beginnings of alternatives once, so that no two
    alternatives in one place begin alike."""
    match node:
        case Seq(items):
            return seq([_factored(item) for item in items])
        case Alt(items):
            parts = [_factored(item) for item in items]
            return _tree([part.items if isinstance(part, Seq) else (part,) for part in parts], 0)
        case Rep(item, low, high):
            return rep(_factored(item), low, high)
        case _:
            return node


def _tree(words: list[tuple[Node, ...]], start: int) -> Node:
    """The alternatives `words`, from character `start` on, grouped by their first characters."""
    by_first: dict[Ranges, list[tuple[Node, ...]]] = {}
    others: list[Node] = []
    ends: list[tuple[int, int]] = []  # last characters of alternatives
    for word in words:
        first = word[start] if start < len(word) else None
        if not isinstance(first, Chars):
            others.append(seq(word[start:]))
        elif len(word) == start + 1:
            ends += first.ranges
        else:
            by_first.setdefault(first.ranges, []).append(word)
    if ends:
        others.append(Chars(ranges(ends)))
    for same in by_first.values():
        end = start + 1
        while len(same) > 1 and _go_on_alike(same, end):
            end += 1
        others.append(seq(same[0][start:]) if len(same) == 1 else seq([*same[0][start:end], _tree(same, end)]))
    return alt(others)


def _go_on_alike(words: list[tuple[Node, ...]], at: int) -> bool:
    """Whether all words have the same set of characters at `at`."""
    parts = [word[at] if at < len(word) else None for word in words]
    return (
        all(isinstance(part, Chars) and part.ranges == parts[0].ranges for part in parts)
        if isinstance(parts[0], Chars)
        else False
    )


def _unrolled(name: str, node: Node) -> Node:
    """Turn `x ::= a x | b` into `a* b`. Rules that are recursive elsewhere than at their end stay as they are."""
    if name not in references(node):
        return node
    parts = _tail(name, node)
    if parts is None:
        return node
    again, last = parts
    return seq([rep(again, 0, None), last])


def _tail(name: str, node: Node) -> tuple[Node, Node] | None:
    """Two nodes: what stands before the rule `name` in alternatives that end with it, and the alternatives that do not.
    None when the rule stands elsewhere too."""
    match node:
        case Ref(other) if other == name:
            return Seq(), Alt()
        case Seq(items) if items and not any(name in references(item) for item in items[:-1]):
            parts = _tail(name, items[-1])
            if parts is None:
                return None
            return seq([*items[:-1], parts[0]]), seq([*items[:-1], parts[1]])
        case Alt(items):
            each = [_tail(name, item) for item in items]
            some = [parts for parts in each if parts is not None]
            return (alt([p[0] for p in some]), alt([p[1] for p in some])) if len(some) == len(each) else None
        case Rep(item, 0, 1):
            parts = _tail(name, item)
            return None if parts is None else (parts[0], alt([parts[1], Seq()]))
        case _:
            return None if name in references(node) else (Alt(), node)
