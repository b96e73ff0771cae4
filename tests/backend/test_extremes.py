"""What no model has: parameters far beyond any tensor, and NaN and infinities in sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import isa_levels
from pyggml.opdef import OPS, record
from pyggml.tensor import Tensor
from pyggml.testing import STRATEGIES, levels_of
from pyggml.testing.draw import SPECIAL, planted
from pyggml.testing.harness import Case, Src, at_levels, check_places, gaussian, nmse, record_case

from .test_ops import ON_ALL_LEVELS

WHOLE = [
    0,
    -1,
    1,
    2,
    3,
    63,
    64,
    *(2**i + j for i in (30, 31, 32, 52, 53, 62, 63) for j in (-1, 0, 1)),
    3 * 2**30,
    -(2**63),
]
FLOATS = [0.0, -1.0, 0.5, 1e-45, 1e-30, 3e38, -3e38, 1e39, float("inf"), -float("inf"), float("nan")]
LARGEST = 1 << 20  # bytes of a result that is still computed
NOT_GIVEN = {"type", "dst_type", "size"}  # parameters that follow from types

few = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def with_params(op: str, node: Tensor, params: dict[str, float]) -> Tensor:
    """`node` again, with other parameters."""
    d = OPS[op]
    asked = node.dtype if len(next(iter(d.dtypes))) > len(d.srcs) else None
    return record(d, node.src, params, dtype=asked, ctx=node.ctx)


@pytest.mark.parametrize(
    "op",
    sorted(op for op, d in OPS.items() if op in STRATEGIES and {*d.params} - NOT_GIVEN and d.kernel and not d.host),
)
def test_parameters(op: str) -> None:
    """An op refuses a parameter, or does what its reference does. It writes nothing beside its tensors, and ends."""

    @few
    @given(STRATEGIES[op], st.data())
    def check(case: Case, data: st.DataObject) -> None:
        node = next((t for t in gg.Graph().build_forward_expand(record_case(case)).nodes if t.op == op), None)
        if node is None:  # top_k by argsort
            return
        given_ = sorted({*node.op_params} - NOT_GIVEN)
        names = data.draw(st.lists(st.sampled_from(given_), min_size=1, max_size=4, unique=True))
        changed = {name: data.draw(st.sampled_from(WHOLE + FLOATS)) for name in names}
        try:
            t = with_params(op, node, {**node.op_params, **changed})
        except (gg.ShapeError, gg.DTypeError):
            return
        if t.nbytes > LARGEST:
            return
        level = data.draw(st.sampled_from(levels_of(op)))
        try:
            (((got, _), (want, _)),) = at_levels(t, [level], data.draw(st.integers(1, 2)))
        except gg.BackendError:  # its data does not fit: ids of more experts than there are
            with pytest.raises(gg.BackendError):
                list(at_levels(t, [], 1))
            return
        # Other parameters may be such that no digit of the result can be told: angles of 1e40 turns.
        whole = all(type(node.op_params[name]) is int and type(x) is int for name, x in changed.items())
        if whole and want.dtype.kind == "f":
            assert nmse(got, want) <= max(case.nmse, 1e-5)

    check()


CONVOLUTIONS = [
    (lambda a, b: gg.conv_transpose_2d_p0(a, b, 2**30), (1, 1, 2, 2), (1, 1, 1, 1)),
    (lambda a, b: gg.conv_transpose_2d_p0(a, b, 2**31 - 1), (1, 1, 2, 2), (1, 1, 1, 1)),
    (lambda a, b: gg.conv_transpose_1d(a, b, 2**31 - 1, 0, 1), (1, 2, 3), (1, 1, 1)),
    (lambda a, b: gg.conv_2d_direct(a, b, 1, 1, 2**30, 0, 2**31 - 1, 1), (1, 256, 2, 2), (1, 256, 2, 1)),
    (lambda a, b: gg.conv_2d_dw_direct(a, b, 1, 1, 2**30, 0, 2**31 - 1, 1), (64, 1, 2, 2), (1, 64, 2, 1)),
    (lambda a, b: gg.conv_3d_direct(a, b, 1, 1, 1, 0, 0, 2**30, 1, 1, 2**31 - 1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 2, 2)),
    (lambda a, b: gg.im2col(a, b, 1, 2**31 - 1, 0, 2**30, 1, 2**30, True, gg.F16), (1, 8, 2, 2), (1, 8, 1, 2)),
]


@pytest.mark.parametrize(("op", "kernel", "image"), CONVOLUTIONS)
@pytest.mark.parametrize("isa", isa_levels())
def test_gaps_take_no_memory(
    isa: str, op: Callable[[Tensor, Tensor], Tensor], kernel: tuple[int, ...], image: tuple[int, ...]
) -> None:
    """Strides, dilations and padding that have no elements."""
    a, b = (Src(gg.F32, shape[::-1], values=gaussian) for shape in (kernel, image))
    node = record_case(Case((a, b), op, 0.0))
    (((got, _), (want, _)),) = at_levels(node, [isa], 2)
    assert nmse(got, want) < 1e-6


def test_beyond_int() -> None:
    with gg.Context() as c:
        a = c.from_numpy(np.ones((1, 1, 1, 1), np.float32), gg.F32)
        for refused in (
            lambda: gg.conv_transpose_2d_p0(a, a, 3 * 2**30),
            lambda: gg.conv_2d_direct(a, a, 1, 1, 2**52, 0, 2**53, 1),
            lambda: gg.im2col_3d(a, a, 1, 1, 1, 2**31, 0, 0, 0, 1, 1, 1, gg.F32),
            lambda: gg.pool_2d(a, "avg", 2**53, 2**53, 1, 1, 2**53 - 1, 2**53 - 1),
            lambda: gg.col2im_1d(a, 2**31, 1, 0),
            lambda: gg.view_3d(a, 1, 2**30, 2**30, 0, 0, 0),
            lambda: gg.interpolate(a, 2**31, 1, 1, 1, "nearest"),
            lambda: gg.clamp(a, float("nan"), 1),
            lambda: gg.swiglu_clamp(gg.repeat_4d(a, 2, 1, 1, 1), None, -1.0),
            lambda: gg.leaky_relu(a, float("inf")),
            lambda: gg.soft_max_ext(a, None, float("nan")),
        ):
            with pytest.raises(gg.ShapeError):
                refused()


# Gradients of recurrences and attention take products in another order than their references: NaN reaches other
# elements. An infinite factor times a probability that is 0 in F32 is NaN; the reference's is infinite.
ELSEWHERE = {
    "cross_entropy_loss_back", "flash_attn_ext_back", "gated_delta_net_back", "gated_linear_attn_back",
    "rwkv_wkv6_back", "rwkv_wkv7_back", "ssm_conv_back", "ssm_scan_back",
}  # fmt: skip
AS_IS = {"cross_entropy_ids_back": 0}  # a source that stays as it is: the factor of those probabilities


@pytest.mark.parametrize(("op", "levels"), ON_ALL_LEVELS)
def test_nan_and_infinities(op: str, levels: list[str]) -> None:
    """They are where the reference has them; those of ELSEWHERE only have to run."""

    @few
    @given(STRATEGIES[op], st.sampled_from(SPECIAL), st.sampled_from([7, 50, 1000]), st.integers(1, 2))
    def check(case: Case, special: list[float], one_of: int, n_threads: int) -> None:
        srcs = tuple(s if i == AS_IS.get(op) else planted(s, special, one_of) for i, s in enumerate(case.srcs))
        if srcs == case.srcs:
            return
        for (got, _), (want, _) in at_levels(record_case(replace(case, srcs=srcs)), levels, n_threads):
            if want.dtype.kind == "i":
                assert np.array_equal(got, want)
            elif op not in ELSEWHERE:
                check_places(got.astype(np.float64), want.astype(np.float64))

    check()
