#!/usr/bin/env bash
# build.sh FOLDER: make in FOLDER a package `pyggml` whose Python is this checkout's and whose C library has sanitizers
# and counters of libFuzzer, and a script `FOLDER/run explore NAME` that fuzzes it. Needs clang (CLANG=clang-19; Debian
# has it) and, in the environment of `python`, pyggml's requirements and atheris.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd) clang=${CLANG:-clang-19}
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

# What clang's runtime has, and the one inside atheris lacks.
cat > "$out/compat.c" << 'EOF'
#include <string.h>
void *__sanitizer_internal_memcpy(void *to, const void *from, size_t n) { return memmove(to, from, n); }
void *__sanitizer_internal_memmove(void *to, const void *from, size_t n) { return memmove(to, from, n); }
void *__sanitizer_internal_memset(void *to, int c, size_t n) { return memset(to, c, n); }
void __ubsan_handle_function_type_mismatch(void *data, size_t to) {}
void __ubsan_handle_function_type_mismatch_abort(void *data, size_t to) {}
EOF
"$clang" -shared -fPIC -fno-builtin "$out/compat.c" -o "$out/compat.so"

ln -sfn "$here/tests" "$out/tests"
ln -sfn "$here/models" "$out/pyggml/models"
ln -sfn "$here/tools" "$out/pyggml/tools"
for part in "$here"/pyggml/*; do
  [[ $(basename "$part") == native ]] || ln -sfn "$part" "$out/pyggml/"
done
for part in "$here"/pyggml/native/*; do ln -sfn "$part" "$out/pyggml/native/"; done
cp --remove-destination "$out"/build/_pggml*.so "$here/csrc/pg.h" "$out/pyggml/native/"

# `python -S` reads no .pth files: an editable install would come before this folder.
packages=$(python -c 'import atheris; print(atheris.path())')
cat > "$out/run" << EOF
#!/usr/bin/env bash
cd "$out"
export PYTHONPATH="$out:$packages" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 LD_PRELOAD="$packages/asan_with_fuzzer.so $out/compat.so"
exec "$(command -v python)" -S -m tests.fuzz "\$@"
EOF
chmod +x "$out/run"
