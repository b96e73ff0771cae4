#!/usr/bin/env bash
# The kernels of 64-bit Arm, cross-compiled and run by qemu: tests/arm.sh [FOLDER [pytest's arguments]]. Many files with a
# table of their counts: tests/arm.sh FOLDER --each SECONDS FILE ... (tests/arm_suite.py). It needs Debian as root, whose
# packages it installs: a compiler, qemu, and a Python for arm64, which is unpacked in FOLDER (kept for the next time, else
# a temporary folder). ARM_CPU is the CPU that qemu is: by default max, which has all levels, without what makes it slow;
# cortex-a76 has neon and dotprod, cortex-a72 neon. Most test files take 20 to 60 times as long as without qemu. What it
# cannot tell: speed.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
if [ $# -gt 0 ]; then
  mkdir -p "$1"
  work=$(cd "$1" && pwd)
  shift
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
python=3.11
root=$work/root

if [ ! -x "$root/usr/bin/python$python" ]; then
  echo "-- a Python for arm64"
  if ! dpkg --print-foreign-architectures | grep -q arm64; then
    dpkg --add-architecture arm64
  fi
  apt-get update -qq
  apt-get install -y -qq gcc-aarch64-linux-gnu qemu-user > "$work/apt.log"
  mkdir -p "$work/debs" "$root"
  ( cd "$work/debs"
    apt-get download -qq $(printf '%s:arm64 ' python$python python$python-minimal libpython$python-{stdlib,minimal,dev} libpython$python \
      libc6 libc6-dev libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 libuuid1 libcrypt1)
    for deb in *.deb; do dpkg -x "$deb" "$root"; done ) 2> "$work/download.log" || { cat "$work/download.log"; exit 1; }
  python -m pip install -q --python-version $python --implementation cp --only-binary :all: --target "$root/site" \
    --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_31_aarch64 \
    numpy cffi click gguf graphviz jinja2 llguidance pyyaml regex rich sentencepiece pytest hypothesis tokenizers \
    pillow soundfile soxr starlette uvicorn pydantic httpx openai anthropic huggingface_hub
fi

# What tests start is this Python, too, and a compiler of theirs makes programs for Arm.
mkdir -p "$root/here"
printf '%s\n' '#!/bin/sh' "exec qemu-aarch64 -cpu \${ARM_CPU:-max,sve=off,pauth-impdef=on} -L $root $root/usr/bin/python$python \"\$@\"" > "$root/here/python"
chmod +x "$root/here/python"
printf '%s\n' 'import sys' "sys.executable = '$root/here/python'" > "$root/here/sitecustomize.py"
ln -sf "$(command -v aarch64-linux-gnu-gcc)" "$root/here/cc"

echo "-- the library"
cat > "$work/toolchain.cmake" <<'END'
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
END
cmake -S csrc -B "$work/build" -G Ninja "-DCMAKE_TOOLCHAIN_FILE=$work/toolchain.cmake" -DCMAKE_BUILD_TYPE=Release \
  "-DPython_EXECUTABLE=$(command -v python)" "-DPython_INCLUDE_DIR=$root/usr/include/python$python" \
  "-DCMAKE_C_FLAGS=-isystem $root/usr/include" > "$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/build" > "$work/build.log" || { grep -A 20 FAILED "$work/build.log"; exit 1; }
rm -rf "$work/installed"
mkdir "$work/installed"
cp -r pyggml models tools tests csrc docs README.md pyproject.toml "$work/installed"
cp -r models tools "$work/installed/pyggml"
rm -f "$work"/installed/pyggml/native/_pggml*
cp "$work"/build/_pggml*.so csrc/pg.h "$work/installed/pyggml/native"
python -c 'import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as put; put(sys.argv[1])' \
  "$work/installed" > "$work/metadata.log" 2>&1 || { cat "$work/metadata.log"; exit 1; }

export PATH="$root/here:$PATH" PYTHONPATH="$root/here:$work/installed:$root/site" PYGGML_SHARED="${PYGGML_SHARED:-$checkout/../shared}"
cd "$work/installed"
python -c 'from pyggml.backends.cpu import isa_levels; print("--", *isa_levels())'
if [ "${1-}" = --each ]; then
  exec python -m tests.arm_suite "$work" "${@:2}"
fi
python -m pytest -q -p no:cacheprovider "${@:-tests/backend/products/test_repack.py}"
