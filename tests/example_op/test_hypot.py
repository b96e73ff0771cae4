"""The kernel in C does what the reference does, for any shape, layout, value and number of threads; and the gradient is
the slope of the reference."""

from example_op import OP

from pyggml.testing import check_op


def test_hypot() -> None:
    check_op(OP, max_examples=25)
