"""Write a grammar in llguidance's notation (Lark).

llguidance cuts a text into lexemes before it parses, and takes the longest lexeme at each place. Large lexemes make it
fast, but a lexeme that could swallow text of its neighbour would be cut in a wrong place. So a part of the grammar
becomes one lexeme only when that cannot happen."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.errors import SamplerError

from .automaton import LARGEST, Automaton, Sizes, automaton, goes_on, shared_word
from .effort import Effort
from .nodes import (
    Alt,
    Chars,
    Node,
    Ranges,
    Ref,
    Rep,
    Rules,
    Seq,
    TokenLeaf,
    children,
    is_never,
    ranges,
    same_first_byte,
)
from .rewrite import holding, nullable, simplified

_LEAF = 16  # steps that a leaf costs, as its places, pairs and sets take some forty microseconds


def lark(rules: Rules) -> str:
    """A grammar for llguidance that matches the same texts as the rule `root`. Raises SamplerError when `root` matches
    no text, or when converting the grammar takes too much work."""
    try:
        effort = Effort()
        rules = simplified(rules, effort)
        if is_never(rules["root"]):
            raise SamplerError("the grammar matches no text: it has rules without an end, or empty sets")
        return _Lexemes(rules, effort).lark()
    except RecursionError:
        raise SamplerError("the grammar is nested too deep") from None


class _Lexemes:
    """Decides which parts of a grammar are lexemes: the largest regular parts at first. Those that could swallow text
    of another lexeme are taken apart, down to single characters if need be."""

    def __init__(self, rules: Rules, effort: Effort) -> None:
        self.rules, self._effort = rules, effort
        self.regular = holding(rules, _is_regular, effort)
        self.empty = holding(rules, nullable, effort)
        self.apart: set[Node] = set()  # nodes that may not be one lexeme
        self._sizes, self._unrolled = Sizes(rules, False), Sizes(rules, True)
        self._automata: dict[Node, Automaton] = {}
        self._expressions: dict[str, str] = {}  # regular expressions of rules
        self._regular: dict[Node, bool] = {}
        while self._take_apart():
            pass

    def is_lexeme(self, node: Node) -> bool:
        """Whether a node is a lexeme at present. A node that matches only the empty text never is."""
        if node in self.apart or isinstance(node, TokenLeaf):
            return False
        if node not in self._regular:
            small = _is_regular(node, self.regular) and self._sizes.size(node) <= LARGEST
            self._regular[node] = small and bool(self._automaton(node).first)
        return self._regular[node]

    def lark(self) -> str:
        """The text."""
        terminals: dict[str, str] = {}
        lines: dict[str, str] = {}
        todo = ["root"]
        names = {"root": "start"}

        def show(node: Node) -> str:
            if self.is_lexeme(node):
                empty = nullable(node, self.empty)
                expression = f"/{self._regex(node)}/" + (" & /(?s:.)+/" if empty else "")
                name = terminals.setdefault(expression, f"L{len(terminals)}")
                return name + ("?" if empty else "")
            match node:
                case Seq(items):
                    return " ".join(map(show, items)) if items else '""'
                case Alt(items):
                    return "(" + " | ".join(map(show, items)) + ")"
                case Rep(item, low, high):
                    return f"({show(item)}){_times(low, high)}"
                case TokenLeaf(token, negated):
                    return f"<[{'^' if negated else ''}{token}]>"
                case Ref(name):
                    if name not in names:
                        names[name] = f"r{len(names)}"
                        todo.append(name)
                    return names[name]
                case Chars():
                    raise AssertionError("a character is a lexeme")

        while todo:
            name = todo.pop()
            lines[names[name]] = show(self.rules[name])
        text = [f"{name}: {body}" for name, body in lines.items()]
        return "\n".join([*text, *(f"{name}: {expression}" for expression, name in terminals.items())]) + "\n"

    def _take_apart(self) -> bool:
        """Take unsafe lexemes apart; False when all are safe."""
        leaves, starts, nexts = self._places()
        alike: dict[frozenset[int], int] = {}  # number of each set of places that may follow a leaf
        followers = [alike.setdefault(frozenset(following), len(alike)) for following in nexts]
        after = list(alike)
        met: set[tuple[int, int]] = set()
        together: set[tuple[int, int]] = set()
        todo: list[tuple[int, int]] = []
        seen: set[frozenset[int]] = set()

        def meet(places: frozenset[int]) -> None:
            if places not in seen and len(together) < len(leaves) ** 2:
                self._effort.spend(len(places) ** 2)
                seen.add(places)
                new = {(x, y) for x in places for y in places} - together
                together.update(new)
                todo.extend(new)

        meet(frozenset(starts))
        shared: dict[tuple[Node, Node], bool] = {}
        while todo:
            x, y = todo.pop()
            pair = (leaves[x], leaves[y])
            if x != y and pair not in shared:
                shared[pair] = shared[pair[1], pair[0]] = self._shared(*pair)
            both = (followers[x], followers[y])
            if both not in met and (x == y or shared[pair]):
                met.add(both)
                self._effort.spend(len(after[both[0]]) + len(after[both[1]]))
                meet(after[both[0]] | after[both[1]])
        unsafe: set[Node] = set()
        verdicts: dict[tuple[Node, Node, Ranges], bool] = {}
        thens = [
            same_first_byte(ranges({r for leaf in {leaves[z] for z in following} for r in self._first(leaf)}))
            for following in nexts
        ]
        for x, y in together:
            a, b = leaves[x], leaves[y]
            if b in unsafe or isinstance(b, (Chars, TokenLeaf)) or isinstance(a, TokenLeaf):
                continue
            then = thens[x]
            key = (a, b, then)
            if key not in verdicts:
                verdicts[key] = goes_on(self._automaton(a), self._automaton(b), then, self._effort)
            if verdicts[key]:
                unsafe.add(b)
        self.apart |= unsafe
        return bool(unsafe)

    def _places(self) -> tuple[list[Node], set[int], list[set[int]]]:
        """The leaves (lexemes and tokens) of the grammar; which of them come first; and which may follow each."""
        leaves: list[Node] = []
        ends: list[int] = []  # for each leaf, the state behind it
        steps: list[list[int]] = []  # for each state, the states that can be entered without a leaf
        ready: dict[int, list[int]] = {}  # the leaves that begin in a state
        rules: dict[str, tuple[int, int]] = {}

        def state() -> int:
            steps.append([])
            return len(steps) - 1

        def rule(name: str) -> tuple[int, int]:
            if name not in rules:
                rules[name] = (state(), state())
                build(self.rules[name], *rules[name])
            return rules[name]

        def build(node: Node, a: int, b: int) -> None:
            if isinstance(node, TokenLeaf) or self.is_lexeme(node):
                self._effort.spend(_LEAF)
                ready.setdefault(a, []).append(len(leaves))
                leaves.append(node)
                ends.append(b)
                if nullable(node, self.empty):
                    steps[a].append(b)
                return
            match node:
                case Seq(items):
                    for item in items:
                        then = state()
                        build(item, a, then)
                        a = then
                    steps[a].append(b)
                case Alt(items):
                    for item in items:
                        build(item, a, b)
                case Rep(item, low, high):
                    first, last = state(), state()
                    build(item, first, last)
                    steps[a].append(first)
                    steps[last].append(b)
                    if high != 1:
                        steps[last].append(first)
                    if low == 0:
                        steps[a].append(b)
                case Ref(name):
                    first, last = rule(name)
                    steps[a].append(first)
                    steps[last].append(b)
                case _:
                    raise AssertionError(node)

        start, _ = rule("root")

        def reached(s: int) -> set[int]:
            seen, todo = {s}, [s]
            while todo:
                for t in steps[todo.pop()]:
                    if t not in seen:
                        seen.add(t)
                        todo.append(t)
            found = {leaf for t in seen for leaf in ready.get(t, ())}
            self._effort.spend(len(seen) + len(found))
            return found

        return leaves, reached(start), [reached(end) for end in ends]

    def _automaton(self, node: Node) -> Automaton:
        if node not in self._automata:
            self._automata[node] = automaton(node, self.rules, self._unrolled, self._effort)
        return self._automata[node]

    def _shared(self, a: Node, b: Node) -> bool:
        if isinstance(a, TokenLeaf) or isinstance(b, TokenLeaf):
            return True  # a token has a text too
        return shared_word(self._automaton(a), self._automaton(b), self._effort)

    def _first(self, node: Node) -> Sequence[tuple[int, int]]:
        if isinstance(node, TokenLeaf):
            return ()  # the lexer sees no text in it
        a = self._automaton(node)
        return [r for p in a.first for r in a.chars[p]]

    def _regex(self, node: Node) -> str:
        """A regular expression in the notation of Rust's regex, for a node without recursion and tokens."""
        match node:
            case Chars(chars):
                one = len(chars) == 1 and chars[0][0] == chars[0][1]
                if one and (letter := chr(chars[0][0])).isascii() and letter.isalnum():
                    return letter
                return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in chars) + "]"
            case Seq(items):
                return "".join(map(self._regex, items))
            case Alt(items):
                return "(?:" + "|".join(map(self._regex, items)) + ")"
            case Rep(item, low, high):
                inner = self._regex(item)
                return (inner if isinstance(item, (Chars, Alt)) else f"(?:{inner})") + _times(low, high)
            case Ref(name):
                if name not in self._expressions:
                    self._expressions[name] = "(?:" + self._regex(self.rules[name]) + ")"
                self._effort.spend(len(self._expressions[name]) // 8)
                return self._expressions[name]
            case _:
                raise AssertionError("a token is no part of a lexeme")


def _is_regular(node: Node, names: set[str]) -> bool:
    """Whether a node has no token and names only rules that are regular, that is not recursive."""
    if isinstance(node, Ref):
        return node.name in names
    return not isinstance(node, TokenLeaf) and all(_is_regular(c, names) for c in children(node))


def _char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _times(low: int, high: int | None) -> str:
    match low, high:
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
        case _:
            return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
