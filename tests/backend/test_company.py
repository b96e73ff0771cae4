"""The result of a token has the same bits whatever is computed beside it: ops that work on tokens one by one, and
recurrences that hand a state from token to token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.tensor import Tensor
from pyggml.types import Floats

ROPE = ("norm", 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)  # mode, n_ctx_orig, freq_base and the numbers of YaRN
N_HEAD = 3


def leaf(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return gg.Context().from_numpy(np.ascontiguousarray(array))


def run(node: Tensor, level: str, n_threads: int) -> Floats:
    return np.array(gg.eval(node, backend=CpuBackend(n_threads, isa=level)), np.float32)


def rope(x: Floats, first: int) -> Tensor:
    pos = np.arange(first, first + len(x), dtype=np.int32)
    n = x.shape[1] // 2
    heads = gg.reshape_3d(leaf(x), n, 2, len(x))
    return gg.rope_ext(heads, leaf(pos), None, n // 2 * 2, *ROPE)


def experts(x: Floats, first: int) -> Tensor:
    return gg.top_k(gg.soft_max(leaf(x)), min(3, x.shape[1]))


BY_TOKEN: dict[str, Callable[[Floats, int], Tensor]] = {  # of rows of tokens, and the number of the first
    "rms_norm": lambda x, _: gg.rms_norm(leaf(x), 1e-5),
    "norm": lambda x, _: gg.norm(leaf(x), 1e-5),
    "l2_norm": lambda x, _: gg.l2_norm(leaf(x), 1e-5),
    "soft_max": lambda x, _: gg.soft_max(leaf(x)),
    "silu": lambda x, _: gg.silu(leaf(x)),
    "gelu": lambda x, _: gg.gelu(leaf(x)),
    "swiglu": lambda x, _: gg.swiglu(gg.concat(leaf(x), leaf(x[:, ::-1]), 0)),
    "sum_rows": lambda x, _: gg.sum_rows(leaf(x)),
    "rope": rope,
    "choice of experts": experts,
}


@pytest.mark.parametrize("op", BY_TOKEN)
@given(data=st.data())
def test_tokens_do_not_depend_on_others(op: str, data: st.DataObject) -> None:
    n, n_tokens = data.draw(st.integers(4, 150)), data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, n_tokens - 1))
    last = data.draw(st.integers(first + 1, n_tokens))
    level = data.draw(st.sampled_from([*isa_levels()]))
    x = np.random.default_rng(n).standard_normal((n_tokens, n // 2 * 2)).astype(np.float32)
    every = run(BY_TOKEN[op](x, 0), level, data.draw(st.sampled_from([1, 2])))
    some = run(BY_TOKEN[op](x[first:last], first), level, 1)
    assert every[first:last].tobytes() == some.tobytes()


def uniform(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Floats:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


class Scan:
    """A recurrence over tokens of `n_seqs` sequences, with heads of n x n states."""

    def __init__(self, op: str, n: int, n_tokens: int, n_seqs: int) -> None:
        self.op, self.n, self.n_seqs = op, n, n_seqs
        by_token, rows = (n_tokens, n_seqs), (N_HEAD, n)
        self.vectors = [uniform(i, *by_token, *rows, low=-0.5, high=0.5) for i in range(6)]
        self.decay = uniform(7, *by_token, N_HEAD, 1, low=0.5)
        self.state = uniform(8, n_seqs, N_HEAD, n, n)

    def node(self, tokens: slice, seqs: slice, state: Floats) -> Tensor:
        """The op on some tokens of some sequences, which begin with `state`."""

        def of(x: Floats) -> Tensor:  # [n, n_head, n_tokens, n_seqs]
            return leaf(x[tokens, seqs].swapaxes(0, 1))

        def flat(x: Floats) -> Tensor:  # [n, n_head, n_tokens of all sequences]
            a = x[tokens, seqs].swapaxes(0, 1)
            return leaf(a.reshape(-1, *a.shape[2:]))

        n_seqs = len(state)
        x, states = self.vectors, leaf(state.reshape(n_seqs, -1))
        if self.op == "rwkv_wkv6":
            return gg.rwkv_wkv6(*map(flat, x[:3]), leaf(x[3][0, 0]), flat(np.abs(x[4]) + np.float32(0.5)), states)
        if self.op == "rwkv_wkv7":
            return gg.rwkv_wkv7(*map(flat, x), states)
        if self.op == "gated_linear_attn":
            return gg.gated_linear_attn(*map(flat, x[:3]), flat(np.abs(x[3]) + np.float32(0.5)), states, 0.3)
        if self.op == "gated_delta_net":
            return gg.gated_delta_net(*map(of, x[:3]), of(-self.decay), of(self.decay), leaf(state))
        n = 1 if self.op == "ssm_scan of channels" else self.n  # Mamba-1, or Mamba-2
        a, dt = uniform(9, N_HEAD, 1, low=-1, high=0), leaf(self.decay[tokens, seqs, :, 0].swapaxes(0, 1))
        own = [leaf(v[tokens, seqs, :1].swapaxes(0, 1)) for v in x[1:3]]
        ids = leaf(np.arange(n_seqs, dtype=np.int32))
        return gg.ssm_scan(leaf(state[:, :, :n]), of(x[0][..., :n]), dt, leaf(a), *own, ids)

    def run(self, tokens: slice, seqs: slice, state: Floats, level: str, n_threads: int) -> tuple[Floats, Floats]:
        """Results [n_tokens, n_seqs, ..] and the states after them."""
        out = run(self.node(tokens, seqs, state), level, n_threads).ravel()
        n = 1 if self.op == "ssm_scan of channels" else self.n
        states = out[out.size - len(state) * N_HEAD * n * self.n :].reshape(len(state), N_HEAD, n, self.n)
        results = out[: out.size - states.size].reshape(len(state), -1, N_HEAD * n).swapaxes(0, 1)
        return results, states


SCANS = ("rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn", "gated_delta_net", "ssm_scan", "ssm_scan of channels")


@pytest.mark.parametrize("op", SCANS)
@given(data=st.data())
def test_recurrences_do_not_depend_on_how_tokens_are_cut(op: str, data: st.DataObject) -> None:
    """Several sequences in pieces of any size give each sequence what it gets alone, token by token."""
    n, n_tokens = data.draw(st.sampled_from([4, 12, 16, 33, 64, 128])), data.draw(st.integers(1, 20))
    n_seqs, level = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([*isa_levels()]))
    scan = Scan(op, n, n_tokens, n_seqs)
    state, results, at = scan.state, list[Floats](), 0
    if op == "ssm_scan of channels":
        state = state[:, :, :1]
    while at < n_tokens:
        end = data.draw(st.integers(at + 1, n_tokens))
        y, state = scan.run(slice(at, end), slice(None), state, level, data.draw(st.sampled_from([1, 2])))
        results.append(y)
        at = end
    seq = data.draw(st.integers(0, n_seqs - 1))
    one = slice(seq, seq + 1)
    alone = scan.state[one, :, :1] if op == "ssm_scan of channels" else scan.state[one]
    for i, y in enumerate(np.concatenate(results)):
        expected, alone = scan.run(slice(i, i + 1), one, alone, level, 1)
        assert y[seq].tobytes() == expected.tobytes(), f"token {i}"
    assert state[one].tobytes() == alone.tobytes()
