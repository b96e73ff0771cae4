"""Arguments of the wrong type, or huge: every public method raises an error of the library, or takes them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyggml.models.memory.kv_cells import LAST_POS

from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ..tiny_model import write_gguf

SWA = {"general.architecture": "gemma2"}
HUGE = [2**31 - 2, 2**31 - 1, 2**31, 2**32 + 5, -(2**32) + 5, 2**40, 2**63, 1 << 70, -(1 << 70)]
small = st.integers(-3, 12)
junk = st.one_of(
    small,
    st.sampled_from(HUGE),
    st.sampled_from(
        [None, "x", "", b"y", 1.5, float("nan"), float("inf"), 1e308, True, [], [1, 2], (3,), {}, object(), {5}]
    ),
    st.sampled_from(
        [np.int32(4), np.float32(0.5), np.arange(3), np.zeros((2, 2)), np.array(["a"]), DType.F16, DType.Q4_K]
    ),
    st.lists(st.one_of(small, st.sampled_from([*HUGE, None, "x", 2.5, float("nan")])), max_size=4),
)
quick = settings(
    max_examples=100, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_gguf(tmp_path_factory.mktemp("args") / "m.gguf"))


def allowed(call: Any) -> Any:
    """What `call` returns; None where it raises an error of the library."""
    try:
        return call()
    except GGMLError:
        return None


def attempt(data: st.DataObject, f: Any, **fixed: Any) -> Any:
    """Call `f` with junk for some of its arguments, `fixed` for the others that have no default."""
    kwargs: dict[str, Any] = {}
    for name, p in inspect.signature(f).parameters.items():
        if p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL:
            continue
        if p.annotation == "bool":
            kwargs[name] = data.draw(st.booleans())
        elif name not in fixed and (p.default is p.empty or data.draw(st.booleans())):
            kwargs[name] = data.draw(junk)
        elif name in fixed:
            kwargs[name] = data.draw(st.one_of(st.just(fixed[name]), junk))
    return allowed(lambda: f(**kwargs))


@quick
@given(st.data())
def test_contexts(model: Model, data: st.DataObject) -> None:
    fixed: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "n_batch": 32, "n_ubatch": 8, "n_seq_max": 2}
    ctx = attempt(data, model.new_context, **fixed)
    if ctx is not None:
        allowed(lambda: ctx.decode([5, 6]))


@quick
@given(st.data(), st.booleans(), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_decode_and_memory(model: Model, data: st.DataObject, flash_attn: bool, choices: list[int]) -> None:
    ctx = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1, n_batch=16, flash_attn=flash_attn)
    ctx.decode([5, 6, 7])
    m = ctx.memory
    methods = [ctx.decode, ctx.logits_ith, ctx.save_seq, ctx.load_seq, ctx.load_state, ctx.build_graph]
    methods += [m.seq_rm, m.seq_cp, m.seq_keep, m.seq_add, m.seq_div, m.seq_pos_max, m.seq_pos_min]
    for i in choices:
        attempt(data, methods[i % len(methods)])
        assert all((cell.pos >= 0) == bool(cell.seq_id) for cell in m.cells)
    allowed(lambda: ctx.decode([8]))


@quick
@given(st.data())
def test_batches(model: Model, data: st.DataObject) -> None:
    ctx = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1)
    batch = Batch()
    for _ in range(3):
        attempt(data, batch.add, token=5, pos=len(batch), seq_ids=0)
        attempt(data, batch.add_embd, row=np.zeros(32), pos=len(batch), seq_ids=1)
    allowed(lambda: ctx.decode(batch))
    given_ = attempt(data, Batch.prompt, tokens=[5, 6], pos=0)
    if given_ is not None:
        allowed(lambda: ctx.decode(given_))


@quick
@given(st.data())
def test_texts_and_generations(model: Model, data: st.DataObject) -> None:
    attempt(data, model.tokenize)
    attempt(data, model.detokenize)
    options = data.draw(
        st.fixed_dictionaries({}, optional=dict.fromkeys(("n_ctx", "n_threads", "stop", "cfg_scale", "top_k"), junk))
    )
    prompt, n_predict = data.draw(st.one_of(st.just("ab"), junk)), data.draw(st.one_of(st.just(2), junk))
    if not (isinstance(n_predict, int) and n_predict < 0):  # until the context is full
        allowed(lambda: list(zip(range(4), model.generate(prompt, n_predict, **options), strict=False)))
        allowed(lambda: list(zip(range(4), model.stream_batch([prompt], n_predict, n_threads=1), strict=False)))
    attempt(data, LongContext, ctx=model.new_context(n_ctx=32, n_threads=1))


@quick
@given(st.data())
def test_samplers(model: Model, data: st.DataObject) -> None:
    names = list(inspect.signature(SamplingParams).parameters)
    given_ = data.draw(st.dictionaries(st.sampled_from(names), junk, max_size=3))
    params = allowed(lambda: SamplingParams(**given_))
    chain = None if params is None else allowed(lambda: SamplerChain(params, model.vocab))
    if chain is not None:
        logits = np.linspace(-3, 3, model.hparams.n_vocab, dtype=np.float32)
        token = allowed(lambda: chain.sample(logits))
        if token is not None:
            chain.accept(token)
            allowed(lambda: chain.sample(logits))


def test_what_was_wrong(model: Model) -> None:
    ctx = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1)
    with pytest.raises(BatchError, match="outside the vocabulary"):
        ctx.decode([-(2**32) + 5])
    with pytest.raises(BatchError, match="pos must be a whole number from 0 to"):
        Batch().add(5, LAST_POS + 1)
    ctx.decode(Batch.one(5, LAST_POS))
    with pytest.raises(BatchError, match="reach beyond position"):
        ctx.decode([6])
    with pytest.raises(BatchError, match=r"must be a whole number|continues"):
        ctx.decode(Batch.one(6, LAST_POS))
    for delta in (1 << 70, -(1 << 70)):
        with pytest.raises(GGMLError, match="delta must be a whole number"):
            ctx.memory.seq_add(0, 0, -1, delta)
    for n_ctx in (2**40, 1 << 70):
        with pytest.raises(ModelError, match="n_ctx must be a whole number from 1 to"):
            model.new_context(n_ctx)


def test_too_large_contexts_eat_no_memory(model: Model) -> None:
    for kwargs in ({"n_ctx": LAST_POS}, {"n_ctx": 2**30}, {"n_ctx": 64, "n_seq_max": LAST_POS * 2**20}):
        with pytest.raises(GGMLError):
            model.new_context(**kwargs)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0])
    assert peak < 2 << 20  # KiB
