"""Fusions: nodes that one kernel computes together. Values that nothing else reads get no memory.

Each has a file: a pattern that finds the nodes, and the operands of the kernel. The results are bit for bit those of
the nodes one by one, with two exceptions: attention, and norms inside products at the level avx512 (their bits are
those of avx2). A node that is an output, or that anything outside of its pattern reads, is never fused away.
"""

from .attention import ATTENTION
from .conv import CONV
from .experts import EXPERTS
from .glu import GLU
from .nodes import Fusion, Nodes
from .norm import NORM
from .products import MATRICES
from .rope import ROPE
from .scan import SCAN

ORDER = (ATTENTION, EXPERTS, SCAN, CONV, ROPE, MATRICES, NORM, GLU)  # the first one has the first choice of nodes

__all__ = ["ORDER", "Fusion", "Nodes"]
