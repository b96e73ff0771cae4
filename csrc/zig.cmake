# A toolchain: the C compiler of the `ziglang` package, which has the headers and libraries of every system. Needs
# PG_TARGET (as x86_64-windows-gnu, aarch64-macos, x86_64-linux-musl) and PG_ZIG, the program zig. Windows' wheels are
# built with it (pyproject.toml), and tests/cross.sh builds for all systems.
foreach(NAME PG_TARGET PG_ZIG)
  if(NOT DEFINED ${NAME})
    set(${NAME} $ENV{${NAME}})
  endif()
  set(ENV{${NAME}} ${${NAME}}) # CMake reads this file again, without our variables, to try the compiler
endforeach()
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR ${PG_TARGET})
if(PG_TARGET MATCHES windows)
  set(CMAKE_SYSTEM_NAME Windows)
elseif(PG_TARGET MATCHES macos)
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_C_COMPILER ${PG_ZIG} cc -target ${PG_TARGET})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON) # zig cc makes none
