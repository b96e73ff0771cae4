"""GBNF: what llama.cpp takes means the same here; errors say where; random grammars against Earley's algorithm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pyggml.errors import SamplerError
from pyggml.llm.grammars.gbnf import parse_gbnf
from pyggml.llm.grammars.lark import lark
from pyggml.llm.model import load_model
from pyggml.llm.samplers.grammar import Grammar
from pyggml.llm.vocab import Vocab

from .earley import ALPHABET, Earley, gbnf, random_grammar

COMMENTED = """root ::= # one
  x |

 # two
 y-1 \r\nx ::= (
 "a" # three
 | "b"
)
y-1 ::= z_2


z_2::="c"
"""
DEEP = "root ::= x0\n" + "\n".join(f'x{i} ::= x{i + 1} "a"' for i in range(3000)) + '\nx3000 ::= "b"'


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


def takes(g: Grammar, ids: list[int]) -> bool:
    matcher = g._matcher  # pyright: ignore[reportPrivateUsage]
    matcher.reset()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def accepts(vocab: Vocab, grammar: str, *texts: str) -> list[bool]:
    g = Grammar(vocab, grammar, None)
    return [takes(g, [b + 3 for b in text.encode()]) for text in texts]


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ("root ::= .", ["\n", "é", "😀", "a"], ["", "ab"]),
        ("root ::= ([a-z]+)?", ["", "a", "abc"], ["A", "a "]),
        ('root ::= ("a"*)*', ["", "a", "aaaa"], ["b"]),
        ('root ::= ("a"{1,2})* "b"', ["b", "ab", "aaab", "aaaaab"], ["a", "aaa"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab", ""]),
        (r'root ::= "\u0041" "\x42" "\U0001F600"', ["AB😀"], ["AB", "u0041"]),
        (r"root ::= [^\u0000-\u001F]+", ["a é😀", "\x7f"], ["a\n", "\x1f", ""]),
        (r"root ::= [+\-*/]", list("+-*/"), [",", ".", "\\"]),
        (r"root ::= [a\]\[-] [^-a] [-a] [a-]", ["]b-a", "-c-a"], ["aa-a", "b--a"]),
        (r'root ::= "\"\\\t\r\n" ', ['"\\\t\r\n'], ['"']),
        ("root ::= [z-a]? [é-ü]", ["é", "ö"], ["z", "aé"]),
        ("root ::= [] [^] \"\" 'x'?".replace(" 'x'?", ' "x"*'), ["", "xx"], ["y"]),
        (COMMENTED, list("abc"), ["", "z"]),
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= x "c"\nx ::= "(" x ")" | [a-c]+', ["ac", "cc", "(b)c", "((abc))c"], ["c", "(c"]),
        ('root ::= x\nx ::= "a" x "b" |', ["", "ab", "aaabbb"], ["a", "abab"]),
        ('root ::= root "+" [0-9]+ | [0-9]+', ["1", "12+3+45"], ["+", "1+"]),
        ('root ::= ws "x"\nws ::= ([ \\t\\n] ws)?', ["x", " \n\t x"], [" "]),
        ('root ::= "a" | stuck\nstuck ::= "b" stuck', ["a"], ["b", "bb"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= ("é" | "e" "\\u0301")+', ["é", "éé", "éé"], ["e"]),
        ('root ::= [a-c]{2,3}{2} "d"{3,}', ["aabbddd", "abcabcdddd"], ["aaddd", "aabbdd"]),
        ('root ::= "a" "é" x | [a-bè]{0,2} "!"\nx ::= "(" x ")" | "c"', ["aéc", "aè!"], ["aèc", "aé!"]),
        ('root ::= <[100]> "x" <[101]>*', ["ax", "axbb"], ["a", "x", "bx", "axa"]),
        ('root ::= !<[100]> "x"', ["bx", "xx"], ["ax", "x"]),
    ],
)  # fmt: skip
def test_what_a_grammar_matches(vocab: Vocab, grammar: str, yes: list[str], no: list[str]) -> None:
    assert accepts(vocab, grammar, *yes, *no) == [True] * len(yes) + [False] * len(no)


def test_tokens_by_their_text(vocab: Vocab) -> None:
    g = Grammar(vocab, 'root ::= "a" <unk> !<unk>', None)
    assert [takes(g, ids) for ids in ([100, 0, 100], [100, 0, 0], [100, 100])] == [True, False, False]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= (", r"line 1, column 11: '\)' should stand here, for the '\(' of line 1, column 10"),
        ('root ::= "a\nb', "line 2, column 2: the grammar ends where '\"' is missing"),
        ('root ::= "a" )', r"line 1, column 14: .* \(at '\)'\)"),
        ('root ::= x\nx ::= "\\q"', r"line 2, column 8: unknown escape \\q \(at '"),
        ('root ::= "\\u00g0"', r"line 1, column 13: \\u takes 4 hexadecimal digits"),
        ('root ::= "\\U00110000"', "line 1, column 11: U\\+110000 is no character"),
        ('root ::= "\\ud800"', r"line 1, column 11: U\+D800 is no character"),
        ("root ::= nothing", "line 1, column 10: there is no rule nothing"),
        ('x ::= "a"', "line 1, column 1: there is no rule root"),
        ("", "line 1, column 1: there is no rule root"),
        ("root ::= *", "line 1, column 10: nothing stands before"),
        ("root ::= x{2,1}\nx ::= .", r"line 1, column 11: repetitions must ascend"),
        ("root ::= x{2001}\nx ::= .", r"line 1, column 11: .* 2000 at most"),
        ("root ::= x{9999999999}\nx ::= .", "line 1, column 21: ',' or '}' should stand here"),
        ("root ::= x{,2}", "line 1, column 12: a number should stand here"),
        ("root = x", "line 1, column 6: '::=' should follow the name root"),
        ("root ::= [a-", "line 1, column 13: the grammar ends"),
        ("root ::= <[259]>", "line 1, column 10: token 259 is not in the vocabulary of 259"),
        ("root ::= <two>", "line 1, column 10: <two> is no token"),
        ("root ::= !x", "line 1, column 11: a token should stand here"),
        ("root ::= " + "(" * 200, "line 1, column 111: too many parentheses"),
        ("root ::= root", "matches no text"),
        ("root ::= [b-a]", "matches no text"),
        (DEEP, "nested too deep"),
    ],
)  # fmt: skip
def test_errors_say_where(vocab: Vocab, grammar: str, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        Grammar(vocab, grammar, None)


def test_random_grammars(vocab: Vocab) -> None:
    n_yes = n_no = 0
    for seed in range(40):
        rng = random.Random(seed)
        grammar = random_grammar(rng)
        reference, text = Earley(grammar), gbnf(grammar, rng)
        texts = {reference.sample(rng) for _ in range(12)} | {
            "".join(rng.choices(ALPHABET[:4], k=rng.randint(0, 5))) for _ in range(12)
        }
        texts |= {t[:i] + rng.choice(ALPHABET) + t[i + 1 :] for t in list(texts) if t for i in (rng.randrange(len(t)),)}
        wanted = {t: reference.matches(t) for t in texts if t is not None}
        try:
            found = dict(zip(wanted, accepts(vocab, text, *wanted), strict=True))
        except SamplerError as e:
            assert "matches no text" in str(e) and not any(wanted.values()), (text, wanted, e)
            continue
        assert found == wanted, (text, {t: w for t, w in wanted.items() if found[t] != w})
        n_yes += sum(wanted.values())
        n_no += len(wanted) - sum(wanted.values())
    assert n_yes > 100 and n_no > 100


def test_lexemes_are_long_where_that_is_safe() -> None:
    def converted(grammar: str) -> str:
        return lark(parse_gbnf(grammar, lambda _: [], 0))

    text = converted('root ::= "[" (string ("," root)*)? "]"\nstring ::= "\\"" ([^"\\\\] | "\\\\" .)* "\\""')
    assert text.count("\nL") == 4 and "*[\\x{22}])/" in text  # a string is one lexeme
    assert converted('root ::= [a-z]+ "z"').count("L") == 2  # a regular grammar is one
    assert converted('root ::= x+ "z"\nx ::= [a-z] | "(" x ")"').count("\nL") == 4  # letters cannot be
