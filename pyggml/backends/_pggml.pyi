# The compiled extension (cffi API mode); pg.h documents it.
from typing import Any

ffi: Any
lib: Any
