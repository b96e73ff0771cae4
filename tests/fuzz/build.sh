#!/usr/bin/env bash
# build.sh FOLDER: make in FOLDER a package `pyggml` whose Python is this checkout's and whose C library has sanitizers
# and counters of libFuzzer, for `python -m tests.fuzz explore` (Debian: clang-19 and libclang-rt-19-dev).
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
out=$1 clang=${CLANG:-clang-19}
mkdir -p "$out/pyggml/native"

# Kernels of products and attention read no files, and compile for half an hour with sanitizers: tests/sanitize.sh has them.
cat > "$out/launcher" << 'EOF'
#!/usr/bin/env bash
case "$*" in
*/products/r16/pack.c*) ;;
*/products/* | */attention/*) exec "${@/-fsanitize=*/-g0}" ;;
esac
exec "$@" -fno-sanitize=function

EOF
chmod +x "$out/launcher"
cmake -S "$here/csrc" -B "$out/build" -G Ninja -DCMAKE_BUILD_TYPE=None "-DCMAKE_C_COMPILER=$clang" -DCMAKE_C_FLAGS=-O1 \
  "-DPG_SANITIZE=address,undefined,fuzzer-no-link" "-DCMAKE_C_COMPILER_LAUNCHER=$out/launcher" "-DPython_EXECUTABLE=$(command -v python)"
cmake --build "$out/build"

ln -sfn "$here/tests" "$out/tests"
ln -sfn "$here/models" "$out/pyggml/models"
ln -sfn "$here/tools" "$out/pyggml/tools"
for part in "$here"/pyggml/*; do
  [[ $(basename "$part") == native ]] || ln -sfn "$part" "$out/pyggml/"
done
for part in "$here"/pyggml/native/*; do ln -sfn "$part" "$out/pyggml/native/"; done
cp "$out"/build/_pggml*.so "$here/csrc/pg.h" "$out/pyggml/native/"
