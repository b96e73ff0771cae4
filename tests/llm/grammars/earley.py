"""Random grammars, their GBNF, and which texts they match: by Earley's algorithm, character by character."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

ALPHABET = 'ab-\n"é😀'
NAMES = ("root", "x", "y-1", "Z")
Expr = tuple[
    object, ...
]  # ("text", str) ("set", bool, items) ("any",) ("ref", str) ("rep", Expr, int, int|None) ("alt", seqs)
Symbol = int | frozenset[str]  # a rule, or characters


def random_grammar(rng: random.Random) -> dict[str, Expr]:
    """Rules of NAMES."""
    return {name: _alternatives(rng, 3) for name in NAMES[: rng.randint(1, len(NAMES))]} | {"leaf": ("text", "a")}


def _alternatives(rng: random.Random, depth: int) -> Expr:
    return (
        "alt",
        [[_item(rng, depth) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))] for _ in range(rng.randint(1, 3))],
    )


def _item(rng: random.Random, depth: int) -> Expr:
    kind = rng.random()
    if depth and kind < 0.25:
        low = rng.choice((0, 0, 1, 1, 2))
        return ("rep", _item(rng, depth - 1), low, rng.choice((None, None, max(low, 1), low + 2, low)))
    if depth and kind < 0.4:
        return _alternatives(rng, depth - 1)
    if kind < 0.55:
        return ("ref", rng.choice((*NAMES, "leaf")))
    if kind < 0.7:
        items = [sorted(rng.choices(ALPHABET, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 2))]
        return ("set", rng.random() < 0.3, items)
    return (
        ("any",)
        if kind < 0.73
        else ("text", "".join(rng.choices(ALPHABET[:4] * 2 + ALPHABET, k=rng.choice((0, 1, 1, 2, 3)))))
    )


def gbnf(grammar: dict[str, Expr], rng: random.Random) -> str:
    """Its text; names that have no rule are `leaf`."""
    return "\n".join(f"{name} ::= {_spelled(e, grammar, rng, top=True)}" for name, e in grammar.items()) + "\n"


def _spelled(e: Expr, grammar: dict[str, Expr], rng: random.Random, top: bool = False) -> str:
    match e:
        case ("text", str(text)):
            return '"' + "".join(_char(c, rng, '"') for c in text) + '"'
        case ("set", bool(negated), list(items)):
            parts = "".join("-".join(_char(c, rng, "]-^[") for c in item) for item in items)
            return f"[{'^' if negated else ''}{parts}]"
        case ("any",):
            return "."
        case ("ref", str(name)):
            return name if name in grammar else "leaf"
        case ("rep", tuple(inner), int(low), high):
            signs = {(0, None): "*", (1, None): "+", (0, 1): "?", (low, None): f"{{{low},}}", (low, low): f"{{{low}}}"}
            return f"({_spelled(inner, grammar, rng)}){signs.get((low, high), f'{{{low},{high}}}')}"
        case ("alt", list(seqs)):
            text = " | ".join(" ".join(_spelled(item, grammar, rng) for item in seq) or '""' for seq in seqs)
            return text if top else f"({text})"
        case _:
            raise AssertionError(e)


def _char(c: str, rng: random.Random, special: str) -> str:
    code = ord(c)
    if c == "\n":
        return rng.choice(("\\n", "\\x0A", "\\u000a"))
    if c in special or rng.random() < 0.2:
        forms = [f"\\U{code:08X}"] + [f"\\u{code:04x}"] * (code < 1 << 16) + [f"\\x{code:02x}"] * (code < 256)
        return rng.choice(forms + ["\\" + c] * (c in '"-[]'))
    return c


@dataclass
class Earley:
    """Rules with symbols alone, of which 0 is the first."""

    grammar: dict[str, Expr]
    rules: list[list[list[Symbol]]] = field(default_factory=list[list[list[Symbol]]])
    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        for name in self.grammar:
            self._new(name)
        for name, e in self.grammar.items():
            self.rules[self.numbers[name]] = [[self._symbol(e)]]

    def _new(self, name: str) -> int:
        self.rules.append([])
        return self.numbers.setdefault(name, len(self.rules) - 1)

    def _rule(self, *choices: list[Symbol]) -> int:
        self.rules.append(list(choices))
        return len(self.rules) - 1

    def _symbol(self, e: Expr) -> Symbol:
        match e:
            case ("text", str(text)):
                return self._rule([frozenset(c) for c in text])
            case ("set", bool(negated), list(items)):
                found = {c for item in items for c in ALPHABET if item[0] <= c <= item[-1]}
                return frozenset(set(ALPHABET) - found if negated else found)
            case ("any",):
                return frozenset(ALPHABET)
            case ("ref", str(name)):
                return self.numbers.get(name, self.numbers["leaf"])
            case ("rep", tuple(inner), int(low), high):
                one = self._symbol(inner)
                if high is None:
                    more = self._rule([])
                    self.rules[more].append([one, more])
                    return self._rule([one] * low + [more])
                assert isinstance(high, int)
                return self._rule(*([one] * n for n in range(low, high + 1)))
            case ("alt", list(seqs)):
                return self._rule(*([self._symbol(item) for item in seq] for seq in seqs))
            case _:
                raise AssertionError(e)

    def matches(self, text: str) -> bool:
        """Whether rule 0 makes the text."""
        columns: list[set[tuple[int, int, int, int]]] = [
            set() for _ in range(len(text) + 1)
        ]  # rule, choice, dot, start
        columns[0] = {(0, i, 0, 0) for i in range(len(self.rules[0]))}
        for at, column in enumerate(columns):
            while True:  # until nothing is new: slow, and right for rules that make the empty text
                new: set[tuple[int, int, int, int]] = set()
                for rule, choice, dot, start in column:
                    symbols = self.rules[rule][choice]
                    if dot == len(symbols):
                        waiting = columns[start]
                        new |= {
                            (r, c, d + 1, s)
                            for r, c, d, s in waiting
                            if d < len(self.rules[r][c]) and self.rules[r][c][d] == rule
                        }
                    elif isinstance(symbol := symbols[dot], int):
                        new |= {(symbol, i, 0, at) for i in range(len(self.rules[symbol]))}
                    elif at < len(text) and text[at] in symbol:
                        columns[at + 1].add((rule, choice, dot + 1, start))
                if new <= column:
                    break
                column |= new
        return any((0, i, len(symbols), 0) in columns[-1] for i, symbols in enumerate(self.rules[0]))

    def sample(self, rng: random.Random) -> str | None:
        """A text that it makes, or None where that grew too long."""
        made: list[str] = []
        todo: list[Symbol] = [0]
        for _ in range(200):
            if not todo:
                return "".join(made)
            symbol = todo.pop()
            if isinstance(symbol, int):
                if not self.rules[symbol]:
                    return None
                todo.extend(reversed(rng.choice(self.rules[symbol])))
            elif not symbol or len(made) > 12:
                return None
            else:
                made.append(rng.choice(sorted(symbol)))
        return None
