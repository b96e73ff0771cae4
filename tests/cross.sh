#!/usr/bin/env bash
# The C library for other systems, compiled and linked here by the `ziglang` package, and run as far as this machine can:
# tests/cross.sh [-O1] FOLDER [TARGET ...]. FOLDER is kept for the next time; -O1 takes half the time of a release.
# What is run are two programs in C, tests/pool_test.c and tests/cross/replay.c: Linux's (musl) here, with qemu-aarch64 on
# Arm, Windows' with wine; what is not installed is left out. For macOS it takes LLVM's linker (Debian: lld).
# docs/platforms.md says what this cannot tell.
set -euo pipefail
cd "$(dirname "$0")/.."
release=(-DCMAKE_BUILD_TYPE=Release)
if [ "$1" = -O1 ]; then
  release=(-DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O1)
  shift
fi
mkdir -p "$1"
work=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- {x86_64,aarch64}-{linux-musl,windows-gnu,macos.11.0}
python=$(command -v python)
headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')

if [ ! -x "$work/zig/bin/python" ]; then
  python -m venv "$work/zig"
  "$work/zig/bin/python" -m pip install -q ziglang
fi
export PG_ZIG PG_TARGET ZIG_GLOBAL_CACHE_DIR=$work/cache WINEPREFIX=$work/wine WINEDEBUG=-all
PG_ZIG=$("$work/zig/bin/python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig
[ -f "$work/plans" ] || python -m tests.cross.record "$work/plans"

# What the library calls of Python.
calls=(Py{Arg_UnpackTuple,Err_Occurred,Eval_RestoreThread,Eval_SaveThread} PyFloat_{AsDouble,FromDouble} PyImport_ImportModule
  PyLong_{FromLong,FromLongLong,FromVoidPtr} PyObject_{CallMethod,Free,Malloc} _Py_Dealloc _Py_NoneStruct)

# What CMake needs of a target's Python: for Windows this one's headers with another configuration, and a list of what
# python3.dll has.
python_of() {
  if [[ $1 != *windows* ]]; then
    echo "-DPython_INCLUDE_DIR=$headers"
    return
  fi
  local made=$work/python-$1 machine=arm64
  [[ $1 == aarch64* ]] || machine=i386:x86-64
  mkdir -p "$made"
  cp -r "$headers/." tests/cross/pyconfig.h "$made"
  printf '%s\n' 'LIBRARY python3.dll' EXPORTS "${calls[@]/%_Py_NoneStruct/_Py_NoneStruct DATA}" > "$made/python3.def"
  "$PG_ZIG" dlltool -m $machine -d "$made/python3.def" -l "$made/libpython3.dll.a"
  echo "-DPython_INCLUDE_DIR=$made" "-DPython_SABI_LIBRARY=$made/libpython3.dll.a"
}

# The command that links for macOS, where zig's own linker ends with a segmentation fault at the whole library. It takes
# the system's functions from a list that ziglang has, and refuses all others.
mac_linker_of() {
  local list=$work/macos arch=${1%%-*} linker
  linker=$(command -v ld64.lld || ls /usr/lib/llvm-*/bin/ld64.lld | tail -n 1)
  mkdir -p "$list"
  sed 's/arm64e\.x1-/arm64-/g' "${PG_ZIG%/*}/lib/libc/darwin/libSystem.tbd" > "$list/libSystem.tbd" # LLVM 14 knows no x1
  echo "$linker -arch ${arch/aarch64/arm64} -platform_version macos 11.0 11.0 -L$list -lSystem"
}

# The command that runs a target's programs here; nothing when there is none.
runner_of() {
  case $1 in
    "$(uname -m)"-linux-*) echo env ;;
    *-linux-*) command -v "qemu-${1%%-*}" || true ;;
    "$(uname -m)"-windows-*) command -v wine || true ;;
  esac
}

for PG_TARGET in "$@"; do
  echo "-- $PG_TARGET"
  build=$work/$PG_TARGET
  mkdir -p "$build"
  # shellcheck disable=SC2046
  cmake -S csrc -B "$build" -G Ninja "-DCMAKE_TOOLCHAIN_FILE=$PWD/csrc/zig.cmake" "${release[@]}" \
    "-DPython_EXECUTABLE=$python" $(python_of "$PG_TARGET") > "$build/cmake.log" 2>&1 || { tail -n 30 "$build/cmake.log"; exit 1; }
  mac=() only=()
  if [[ $PG_TARGET == *macos* ]]; then
    read -ra mac <<< "$(mac_linker_of "$PG_TARGET")"
    mapfile -t only < <(ninja -C "$build" -t targets all | sed -n 's/\(.*\.o\): C_COMPILER.*/\1/p')
  fi
  cmake --build "$build" -- -k 0 "${only[@]}" > "$build/build.log" || { grep -A 20 FAILED "$build/build.log" | head -n 60; exit 1; }
  if [ ${#mac[@]} -gt 0 ]; then
    mapfile -t python_has < <(printf -- '-U\n_%s\n' "${calls[@]}")
    (cd "$build" && "${mac[@]}" -bundle "${python_has[@]}" "${only[@]}" -o _pggml.abi3.so)
  fi
  (cd "$build" && ls -s --block-size=K _pggml.*)
  link=(-lm)
  [[ $PG_TARGET != *linux* ]] || link+=(-static)
  [[ $PG_TARGET != *windows* ]] || link+=(-lapi-ms-win-core-synch-l1-2-0)
  mapfile -t objects < <(find "$build/CMakeFiles" -path '*.dir/*.o*' ! -path '*/_pggml.dir/*' ! -name '*.d')
  runner=$(runner_of "$PG_TARGET")
  for source in tests/pool_test.c tests/cross/replay.c; do
    program=$build/$(basename "${source%.c}").exe
    compile=("$PG_ZIG" cc -target "$PG_TARGET" -std=gnu11 -O1 -Icsrc "$source")
    if [ ${#mac[@]} -gt 0 ]; then
      "${compile[@]}" -c -o "$program.o"
      "${mac[@]}" "$program.o" "${objects[@]}" -o "$program"
    else
      "${compile[@]}" "${objects[@]}" -o "$program" "${link[@]}"
    fi
    if [ -n "$runner" ]; then
      $runner "$program" $([[ $source != *replay* ]] || echo "$work/plans") | tr -d '\r'
    else
      echo "$(basename "$program"): linked, not run"
    fi
  done
done
