"""What a recurrent layer remembers: states read from their cells and stored, convolutions over time."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..memory.recurrent import StateSlot
from ..ubatch import UBatch
from .build import Build


def build_inp_s_read(b: Build) -> Tensor:
    """The cells of the states that the sequences go on from: I32 ne [n_seqs]."""
    return b.input("inp_s_read", DType.I32, (b.n_seqs,), lambda u, memory: slot_of_states(u).read)


def slot_of_states(u: UBatch) -> StateSlot:
    """The cells of the states of a ubatch's sequences, which the memory must have."""
    assert u.states is not None, u
    return u.states


def read_state(b: Build, cells: Tensor, name: str, il: int) -> Tensor:
    """The states that the ubatch's sequences go on from, ne [floats, n_seqs], read from `cells`, ne [floats,
    n_cells]."""
    return b.cb(gg.get_rows(cells, build_inp_s_read(b)), name, il)


def store_state(b: Build, cells: Tensor, states: Tensor, name: str, il: int) -> None:
    """Put `states`, floats * n_seqs elements of any shape, into the cells of the ubatch's sequences."""
    if not states.is_contiguous:
        states = gg.cont(states)
    rows = gg.reshape_2d(states, cells.ne[0], b.n_seqs)
    ids = b.input("inp_s_write", DType.I32, (b.n_seqs,), lambda u, memory: slot_of_states(u).write)
    b.graph.build_forward_expand(b.cb(gg.set_rows(cells, rows, ids), name, il))


def by_sequence(b: Build, cur: Tensor) -> Tensor:
    """`cur`, ne [n, n_tokens], as ne [n, n_seq_tokens, n_seqs]: rows may lie apart."""
    row = cur.nb[1]
    return gg.view_3d(cur, cur.ne[0], b.n_seq_tokens, b.n_seqs, row, row * b.n_seq_tokens, 0)


def build_conv_window(b: Build, cur: Tensor, d_conv: int, il: int) -> Tensor:
    """Make the input of a convolution over `d_conv` tokens: d_conv - 1 columns of earlier tokens, then those of `cur`,
    ne [channels, n_tokens]. The result has a row for each channel: ne [d_conv - 1 + n_seq_tokens, channels, n_seqs].
    Its last columns are stored for the next tokens."""
    channels, n_seqs, cells = cur.ne[0], b.n_seqs, b.states.r_l[il]
    before = gg.reshape_3d(read_state(b, cells, "conv_states", il), d_conv - 1, channels, n_seqs)
    window = b.cb(gg.concat(before, gg.transpose(by_sequence(b, cur)), 0), "conv_input", il)
    nb = window.nb
    last = gg.view_3d(window, d_conv - 1, channels, n_seqs, nb[1], nb[2], b.n_seq_tokens * nb[0])
    store_state(b, cells, last, "conv_states_updated", il)
    return window


def build_conv(b: Build, cur: Tensor, role: str, d_conv: int, il: int) -> Tensor:
    """`cur`, ne [channels, n_tokens], convolved over time with the weights of that role, ne [d_conv, channels],
    plus the bias when the model has one: ne as `cur`."""
    channels = cur.ne[0]
    window = build_conv_window(b, cur, d_conv, il)
    out = gg.ssm_conv(window, as_f32(b.weight(role, (d_conv, channels), il)))
    out = b.cb(gg.reshape_2d(out, channels, b.n_tokens), "conv_output", il)
    bias = b.optional(role, (channels,), il, "bias")
    return out if bias is None else b.cb(gg.add(out, bias), "conv_output_biased", il)


def as_f32(weight: Tensor) -> Tensor:
    """The weight in the one type that some ops read, and that almost all files have it in."""
    return weight if weight.dtype is DType.F32 else gg.cast(weight, DType.F32)


def tokens_by_sequence(b: Build, t: Tensor) -> Tensor:
    """ne [n, m, n_tokens] as ne [n, m, n_seq_tokens, n_seqs]."""
    return gg.view_4d(t, *t.ne[:2], b.n_seq_tokens, b.n_seqs, t.nb[1], t.nb[2], t.nb[2] * b.n_seq_tokens, 0)


def parts_of_rows(t: Tensor, first: int, n: int, size: int) -> Tensor:
    """Cut `n` parts of `size` elements out of each row, from element `first` on: ne [size, n, n_tokens]."""
    return gg.view_3d(t, size, n, t.ne[1], size * t.nb[0], t.nb[1], first * t.nb[0])
