"""The logger of pyggml: silent until the program asks for it. In a file of its own, because `import pyggml` does not
need `logging`, which takes as long to import as ten of our files."""

import logging

LOG = logging.getLogger("pyggml")
LOG.addHandler(logging.NullHandler())
