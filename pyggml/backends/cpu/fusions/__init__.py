"""Fusions: nodes that one kernel computes together. Values that nothing else reads get no memory.

Each has a file: a pattern that finds the nodes, and the operands of the kernel. The results are those of the nodes one
by one, bit for bit, except attention's and, at the level avx512, norms' that products do (these are avx2's). A node
that is an output, or that anything outside of its pattern reads, is never fused away.
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

ORDER = (ATTENTION, EXPERTS, SCAN, CONV, ROPE, MATRICES, NORM, GLU)  # what comes first has the first choice of nodes

__all__ = ["ORDER", "Fusion", "Nodes"]
