#!/usr/bin/env bash
# Levels that this CPU lacks, computed with AVX2 (tests/emulate/). What it cannot tell: whether a CPU runs the instructions
# as their manual says, and their speed.
#   tests/emulate.sh: those of x86, the kernels' tests and the golden models
#   tests/emulate.sh arm [pytest's arguments]: the unit tests at each level of Arm. It takes about an hour: not in CI
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Put a package in $work whose library computes levels with AVX2: `avx512` (and above), or `arm`.
build() {
  installed=$(cd "$work" && python -c 'import pathlib, pyggml; print(pathlib.Path(pyggml.__file__).parent)')
  [[ $installed == *-packages/* ]] || { echo "an editable install hides what is built here: pip install . first" >&2; exit 1; }
  cmake -S csrc -B "$work/build" -G Ninja -DPG_EMULATE="$1" -DCMAKE_BUILD_TYPE=None \
    "-DCMAKE_C_FLAGS=-O1 -D_FORTIFY_SOURCE=3" "-DPython_EXECUTABLE=$(command -v python)" > "$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
  cmake --build "$work/build" > "$work/build.log" || { grep -A 20 FAILED "$work/build.log"; exit 1; }
  cp -r "$installed" "$work/pyggml"
  cp "$work"/build/_pggml*.so "$work/pyggml/native/"
  export PYTHONPATH="$work"
}

if [ "${1-}" = arm ]; then
  shift
  build arm
  for level in neon dotprod i8mm; do
    echo "-- computed: $level"
    PYGGML_ISA=$level pytest -n 2 -p no:cacheprovider "$@"
  done
  exit
fi
cat > "$work/lacking.py" << 'END'
from pyggml.backends.cpu import isa_levels
print(" or ".join(isa for isa in ("avx512", "avx512vnni", "amx") if isa not in isa_levels()))
END
lacking=$(cd "$work" && python lacking.py)
if [ -z "$lacking" ]; then
  echo "this CPU runs all levels: the tests have run them"
  exit
fi
echo "-- computed: $lacking"
build avx512
pytest -n 2 tests/backend -k "$lacking" -p no:cacheprovider "$@"
PYGGML_ISA=amx pytest -n 2 tests/golden -p no:cacheprovider "$@"
