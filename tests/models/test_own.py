"""Architectures of one's own: registered from outside, found by entry points, refused when another has the name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyggml.models
import pytest
from pyggml.models import Architecture, get_architecture
from pyggml.models.blocks import Build, build_inp_embd, build_inp_out_ids, build_lm_head
from pyggml.models.decoder import PlainDecoder, decoder
from pyggml.models.hparams import RankHead, Router
from pyggml.models.weights import ShapeOnlyWeights

import pyggml as gg
from pyggml.graph import Graph

from ..random_model import KV, write_random

OWN = decoder("tests-own", build=PlainDecoder(act="relu_sqr", gated=False), rope_type="neox")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(pyggml.models, "_registered", {})
    yield


def registered_by(module: str, architecture: Any) -> None:
    """`gg.register_architecture`, called by another module."""
    exec("gg.register_architecture(a)", {"__name__": module, "gg": gg, "a": architecture})


def test_files_of_a_name_that_nobody_knows(tmp_path: Path) -> None:
    gg.register_architecture(OWN)
    assert get_architecture("tests-own") is OWN
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    model = gg.load_model(path)
    assert not model.unused and model.arch == "tests-own"
    on = {}
    for backend in ("cpu", "ref"):
        ctx = model.new_context(32, backend=backend, type_k=gg.F32, type_v=gg.F32, n_threads=1)
        ctx.decode([1, 2, 3])
        on[backend] = ctx.logits.copy()
    np.testing.assert_allclose(on["cpu"], on["ref"], atol=1e-4)
    with gg.load_model(write_random(tmp_path / "text.gguf", "tests-own", {}, tokens=[f"w{i}" for i in range(64)])) as m:
        assert len(list(m.generate([1, 2], 3, temp=0.0))) == 3


def test_a_notebook_registers_again() -> None:
    registered_by("__main__", OWN)
    again = decoder("tests-own", "tests-other")
    registered_by("__main__", again)
    assert get_architecture("tests-own") is get_architecture("tests-other") is again


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        (OWN, "the architecture 'tests-own' is tests.first's: give yours (tests.second's) another name"),
        (decoder("tests-new", "llama"), "the architecture 'llama' is pyggml's: give yours"),
        (decoder(), "the names of an architecture must be a tuple of strings, not ()"),
        (Architecture("own", OWN.build, OWN.read), "must be a tuple of strings, not 'own'"),  # pyright: ignore[reportArgumentType]
        (PlainDecoder(), "register_architecture takes an Architecture, not PlainDecoder("),
    ],
)
def test_what_is_refused(architecture: Any, says: str) -> None:
    registered_by("tests.first", OWN)
    with pytest.raises(gg.ModelError) as e:
        registered_by("tests.second", architecture)
    assert says in str(e.value)
    with pytest.raises(gg.ModelError, match="'tests-new' is not supported"):  # none of the names was taken
        get_architecture("tests-new")


def test_an_unknown_name_says_how_to_register() -> None:
    registered_by("tests.first", OWN)
    with pytest.raises(gg.ModelError, match=r"like it: tests-own\. One of your own: pyggml\.register_architecture"):
        get_architecture("tests-owm")


def package(folder: Path, name: str, code: str) -> None:
    """A package as pip installs it: a module, and the metadata that names it for the architecture `name`."""
    (folder / f"own_{name}.py").write_text(code)
    info = folder / f"own_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pyggml.architectures]\ntests-{name} = own_{name}\n")


def test_packages_are_found_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = "import pyggml as gg\nfrom pyggml.models.decoder import decoder\n"
    package(tmp_path, "good", f'{good}gg.register_architecture(decoder("tests-good"))\n')
    package(tmp_path, "silent", "")
    package(tmp_path, "broken", "import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    assert "tests-good" in get_architecture("tests-good").names
    with pytest.raises(gg.ModelError, match="own_silent is to register the architecture 'tests-silent', and does not"):
        get_architecture("tests-silent")
    with pytest.raises(gg.ModelError, match="in own_broken, whose import failed: No module named 'no_such_module'"):
        get_architecture("tests-broken")


def test_the_command_line_finds_packages(tmp_path: Path) -> None:
    code = "import pyggml as gg\nfrom pyggml.models.decoder import decoder\n"
    package(tmp_path, "line", f'{code}gg.register_architecture(decoder("tests-line"))\n')
    gg.register_architecture(decoder("tests-line"))
    path = write_random(tmp_path / "m.gguf", "tests-line", {})
    code = "import sys; from pyggml.tools.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "dump-dot", "-m", str(path), "-o", str(tmp_path / "g.dot")]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)  # cwd: on the path of -c
    assert plain.returncode == 0, plain.stderr
    assert "l_out-3" in (tmp_path / "g.dot").read_text()


def _nothing(b: Build) -> Graph:
    b.weight("token_embd", (b.hparams.n_embd, b.hparams.n_vocab))
    return b.graph


def _sums(b: Build) -> Graph:
    with b.ctx:
        return b.graph.build_forward_expand(gg.sum(build_inp_embd(b)).set_name("sums"))


@pytest.mark.parametrize(
    ("build", "read", "says"),
    [
        (
            _nothing,
            OWN.read,
            r"the graph of tests-own \(b\.graph\) ends with no nodes, not with logits of ne",
        ),
        (_sums, OWN.read, r"ends with sums: F32 ne \[1, 1, 1, 1\], not with logits of ne \[64"),
        (OWN.build, lambda r: 5, "the architecture tests-own: its `read` gave no HParams, but 5"),
    ],
)
def test_a_builder_ends_with_logits(build: Any, read: Any, says: str, tmp_path: Path) -> None:
    gg.register_architecture(OWN)
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    gg.register_architecture(Architecture(("tests-own",), build, read))
    with pytest.raises(gg.ModelError, match=says):
        gg.load_model(path)


def test_a_graph_with_the_rows_of_all_tokens_is_refused(tmp_path: Path) -> None:
    """Who forgets to pick the rows of outputs would get logits of other tokens."""

    def build(b: Build) -> Graph:
        with b.ctx:
            return build_lm_head(b, build_inp_embd(b))

    gg.register_architecture(OWN)
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    gg.register_architecture(Architecture(("tests-own",), build, OWN.read))
    model = gg.load_model(path)
    for n_tokens in (3, 2):
        ctx = model.new_context(32, n_threads=1)
        with pytest.raises(gg.ModelError, match=r"ends with result_output: F32 ne \[64, .*build_out_rows picks"):
            ctx.decode([1, 2, 3][:n_tokens])
        assert ctx.memory.used == 0


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 7])
def test_a_builder_may_ask_what_a_size_is(n_tokens: int, tmp_path: Path) -> None:
    """The graph is then one of that size, not one for all sizes that has the number of one of them."""

    def build(b: Build) -> Graph:
        with b.ctx:
            cur = build_inp_embd(b)
            cur = gg.add(cur, gg.scale(cur.sum(axis=0), 1 / int(b.n_tokens)))
            return build_lm_head(b, gg.get_rows(cur, build_inp_out_ids(b)))

    gg.register_architecture(OWN)
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    gg.register_architecture(Architecture(("tests-own",), build, OWN.read))
    model = gg.load_model(path)
    embd, output = (model.weights[f"{name}.weight"].numpy().astype(float) for name in ("token_embd", "output"))
    x = embd[: n_tokens + 1][1:]
    ctx = model.new_context(32, n_threads=1)
    ctx.decode(list(range(1, n_tokens + 1)), "all")
    np.testing.assert_allclose(ctx.logits, (x + x.mean(axis=0)) @ output.T, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (2, "not 2"),
        (None, "not None"),
        ([1.0, 1.0], r"not \[1.0, 1.0\]"),
        (np.ones(9), r"up to 2 numbers, not shape \(9,\), float64"),
        (np.array(["a", "b"]), r"not shape \(2,\), <U1"),
    ],
)
def test_what_fill_must_give(values: Any, says: str, tmp_path: Path) -> None:
    def build(b: Build) -> Graph:
        with b.ctx:
            cur = gg.mul(build_inp_embd(b), b.input("inp_own", gg.F32, (1, b.n_tokens), lambda u, memory: values))
            (one,) = b.input_group({"inp_group": (gg.F32, (1, b.n_tokens))}, lambda u, memory: grouped)
            return build_lm_head(b, gg.get_rows(gg.mul(cur, one), build_inp_out_ids(b)))

    gg.register_architecture(OWN)
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    gg.register_architecture(Architecture(("tests-own",), build, OWN.read))
    ctx = gg.load_model(path).new_context(32, n_threads=1)
    grouped: Any = (np.ones(2),)
    with pytest.raises(gg.ModelError, match=f"the input inp_own: fill gives an array .*{says}"):
        ctx.decode([1, 2])
    values, grouped = np.ones(2), (values,)
    with pytest.raises(gg.ModelError, match=f"the input inp_group: fill gives an array .*{says}"):
        ctx.decode([1, 2])
    grouped = ()
    with pytest.raises(gg.ModelError, match=r"the inputs inp_group: fill gives an array for each, not \(\)"):
        ctx.decode([1, 2])


def test_declared_tensors_are_what_a_file_must_have() -> None:
    hp = OWN.hparams("tests-own", {f"tests-own.{k}": v for k, v in KV.items()})
    asked = OWN.declare(hp, ShapeOnlyWeights()).asked
    assert asked["blk.1.ffn_up.weight"].ne == (32, 48) and "blk.1.ffn_gate.weight" not in asked


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PlainDecoder(act="zzz"), "act must be one of silu, gelu, gelu_erf, "),  # pyright: ignore[reportArgumentType]
        (lambda: PlainDecoder(act="rel"), "not 'rel' (is 'relu' meant?)"),  # pyright: ignore[reportArgumentType]
        (lambda: PlainDecoder(norm="zzz"), "norm must be one of rms, layer, not 'zzz'"),  # pyright: ignore[reportArgumentType]
        (lambda: PlainDecoder(qk_norm="zzz"), "qk_norm must be one of none, head, heads, roped, row"),  # pyright: ignore[reportArgumentType]
        (lambda: PlainDecoder(sinks=True), "sinks must be one of none, some, all, not True"),  # pyright: ignore[reportArgumentType]
        (
            lambda: decoder("own", rope_type="neoxx"),
            "rope_type must be one of norm, neox, mrope, imrope, not 'neoxx' (is 'neox'",
        ),
        (lambda: decoder("own", memory="zzz"), "the memory of own must be one of kv, recurrent, hybrid, cross, none"),  # pyright: ignore[reportArgumentType]
        (
            lambda: Router(gating="softmaxx").check(2, 1),
            "the gating of experts must be one of softmax, sigmoid, sqrt_softplus",
        ),  # pyright: ignore[reportArgumentType]
        (lambda: RankHead(act="relu"), "the activation of a reranker must be one of tanh, gelu, gelu_erf"),  # pyright: ignore[reportArgumentType]
        (lambda: RankHead(pooling="first"), "the pooling of a reranker must be one of none, mean, cls, last, rank"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_names_of_parts_that_there_are_not(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(gg.ModelError) as e:
        make()
    assert says in str(e.value)


def test_hyperparameters_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(gg.OptionError, match=r"decoder has no option 'rope_typ' .is 'rope_type' meant"):
        decoder("own", rope_typ="neox")
    gg.register_architecture(OWN)
    path = write_random(tmp_path / "own.gguf", "tests-own", {})
    gg.register_architecture(decoder("tests-own", rope_type=lambda r: "zzz"))
    with pytest.raises(gg.ModelError, match="rope_type must be one of norm, neox, mrope, imrope, not 'zzz'"):
        gg.load_model(path)
