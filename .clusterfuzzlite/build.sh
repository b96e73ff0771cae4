#!/bin/bash -eu
# A target for each harness of tests/fuzz. The image's $CC and $CFLAGS build pyggml's C library with sanitizers.
cd "$SRC/pyggml"
pip3 install '.[test]'
for name in $(sed -n 's/^def \([a-z0-9]*\)(data: bytes).*/\1/p' tests/fuzz/*.py); do
  cat > "$SRC/fuzz_$name.py" << EOF
import sys
from tests.fuzz.__main__ import main
sys.argv[1:1] = ["explore", "$name", "--work", "/tmp/fuzz", "--rest"]
main()
EOF
  compile_python_fuzzer "$SRC/fuzz_$name.py" --paths "$SRC/pyggml/tests/.." --collect-all pyggml --collect-submodules tests.fuzz
  [ ! -f "tests/fuzz/corpus/$name.zip" ] || cp "tests/fuzz/corpus/$name.zip" "$OUT/fuzz_${name}_seed_corpus.zip"
done
