#!/usr/bin/env bash
# The C library under ASAN + UBSAN: kernels (the op tests on every instruction set), vocabularies, what reads files; and
# the thread pool under TSAN.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v python)

echo "-- TSAN: the thread pool"
gcc -std=gnu11 -g -O1 -fsanitize=thread -Wno-tsan -Icsrc tests/pool_test.c csrc/exec/pool.c csrc/exec/exec.c csrc/exec/pace.c csrc/os/{linux,lock,posix,posix_interrupt,posix_mapped}.c -o "$work/pool_test" -pthread
TSAN_OPTIONS=halt_on_error=1 setarch "$(uname -m)" -R "$work/pool_test"

echo "-- ASAN + UBSAN: the library"
installed=$(cd "$work" && $python -c 'import pathlib, pyggml; print(pathlib.Path(pyggml.__file__).parent)')
[[ $installed == *-packages/* ]] || { echo "an editable install hides what is built here: pip install . first" >&2; exit 1; }
cmake -S csrc -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O1 "-DPG_SANITIZE=address,undefined" \
  "-DPython_EXECUTABLE=$python" > "$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/build" > "$work/build.log" || { tail -n 40 "$work/build.log"; exit 1; }
cp -r "$installed" "$work/pyggml"
cp "$work"/build/_pggml*.so "$work/pyggml/native/"
export PYTHONPATH="$work" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# ASAN makes mlock do nothing, which always works.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
  pytest -n 2 tests/backend tests/golden tests/llm/vocab tests/gguf_io tests/null/test_gguf_io.py \
  tests/hf/test_tokenizers.py tests/hf/test_errors.py tests/hf/test_safetensors.py \
  --deselect tests/null/test_gguf_io.py::test_lock_memory -p no:cacheprovider "$@"
