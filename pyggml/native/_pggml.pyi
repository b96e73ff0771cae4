# The compiled extension (cffi API mode); pg.h and vocab/vocab.h document it.
from typing import Any

ffi: Any
lib: Any
