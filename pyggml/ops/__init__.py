"""Every op, one family per file. Importing this package defines them all (see `pyggml.opdef.OPS`)."""

from . import _operators as _operators
from . import attention as _attention
from . import binary as _binary
from . import copy as _copy
from . import glu as _glu
from . import matmul as _matmul
from . import norm as _norm
from . import reduce as _reduce
from . import rope as _rope
from . import rows as _rows
from . import scalar as _scalar
from . import shape as _shape
from . import softmax as _softmax
from . import unary as _unary
from . import view as _view
from .attention import *
from .binary import *
from .copy import *
from .glu import *
from .matmul import *
from .norm import *
from .reduce import *
from .rope import *
from .rows import *
from .scalar import *
from .shape import *
from .softmax import *
from .unary import *
from .view import *

__all__: list[str] = []
__all__ += _attention.__all__
__all__ += _binary.__all__
__all__ += _copy.__all__
__all__ += _glu.__all__
__all__ += _matmul.__all__
__all__ += _norm.__all__
__all__ += _reduce.__all__
__all__ += _rope.__all__
__all__ += _rows.__all__
__all__ += _scalar.__all__
__all__ += _shape.__all__
__all__ += _softmax.__all__
__all__ += _unary.__all__
__all__ += _view.__all__
