"""Every op, one family per file. Importing this package defines them all (see `pyggml.opdef.OPS`)."""

from . import _operators as _operators
from . import attention as _attention
from . import binary as _binary
from . import compare as _compare
from . import conv as _conv
from . import conv_direct as _conv_direct
from . import conv_transpose as _conv_transpose
from . import copy as _copy
from . import custom as _custom
from . import einsum as _einsum
from . import glu as _glu
from . import im2col as _im2col
from . import interpolate as _interpolate
from . import linear_attn as _linear_attn
from . import loss as _loss
from . import matmul as _matmul
from . import norm as _norm
from . import opt_step as _opt_step
from . import pad as _pad
from . import pooling as _pooling
from . import reduce as _reduce
from . import region as _region
from . import rope as _rope
from . import rows as _rows
from . import scalar as _scalar
from . import shape as _shape
from . import softmax as _softmax
from . import solve_tri as _solve_tri
from . import sparse as _sparse
from . import ssm as _ssm
from . import unary as _unary
from . import view as _view
from . import win_attention as _win_attention
from .attention import *
from .binary import *
from .compare import *
from .conv import *
from .conv_direct import *
from .conv_transpose import *
from .copy import *
from .custom import *
from .einsum import *
from .glu import *
from .im2col import *
from .interpolate import *
from .linear_attn import *
from .loss import *
from .matmul import *
from .norm import *
from .opt_step import *
from .pad import *
from .pooling import *
from .reduce import *
from .region import *
from .rope import *
from .rows import *
from .scalar import *
from .shape import *
from .softmax import *
from .solve_tri import *
from .sparse import *
from .ssm import *
from .unary import *
from .view import *
from .win_attention import *

__all__: list[str] = []
__all__ += _attention.__all__
__all__ += _binary.__all__
__all__ += _compare.__all__
__all__ += _conv.__all__
__all__ += _conv_direct.__all__
__all__ += _conv_transpose.__all__
__all__ += _copy.__all__
__all__ += _custom.__all__
__all__ += _einsum.__all__
__all__ += _glu.__all__
__all__ += _im2col.__all__
__all__ += _interpolate.__all__
__all__ += _linear_attn.__all__
__all__ += _loss.__all__
__all__ += _matmul.__all__
__all__ += _norm.__all__
__all__ += _opt_step.__all__
__all__ += _pooling.__all__
__all__ += _pad.__all__
__all__ += _reduce.__all__
__all__ += _region.__all__
__all__ += _rope.__all__
__all__ += _rows.__all__
__all__ += _scalar.__all__
__all__ += _shape.__all__
__all__ += _softmax.__all__
__all__ += _solve_tri.__all__
__all__ += _sparse.__all__
__all__ += _ssm.__all__
__all__ += _unary.__all__
__all__ += _view.__all__
__all__ += _win_attention.__all__
