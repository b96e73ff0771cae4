# A toolchain: the C compiler of the `ziglang` package, which has the headers and libraries of every system. pip builds
# with it on Windows (pyproject.toml), and tests/cross.sh for all systems. PG_ZIG is the program, PG_TARGET the target,
# as x86_64-windows-gnu; without them: ziglang of this Python, and this machine's Windows.
if(NOT DEFINED ENV{PG_ZIG})
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import os, sysconfig, ziglang; print(os.path.dirname(ziglang.__file__).replace(chr(92), '/') + '/zig;' + sysconfig.get_platform().split('-')[-1])"
    OUTPUT_VARIABLE ZIG OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(POP_BACK ZIG MACHINE)
  set(ENV{PG_ZIG} ${ZIG}) # CMake reads this file again, without our variables, to try the compiler
  string(REPLACE amd64 x86_64 MACHINE ${MACHINE})
  string(REPLACE arm64 aarch64 MACHINE ${MACHINE})
  set(ENV{PG_TARGET} ${MACHINE}-windows-gnu)
endif()
set(PG_ZIG $ENV{PG_ZIG})
set(PG_TARGET $ENV{PG_TARGET})
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR ${PG_TARGET})
if(PG_TARGET MATCHES windows)
  set(CMAKE_SYSTEM_NAME Windows)
elseif(PG_TARGET MATCHES macos)
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_INSTALL_NAME_TOOL install_name_tool) # CMake wants to know of one, and uses it when it installs
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_C_COMPILER ${PG_ZIG} cc -target ${PG_TARGET})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON) # zig cc makes none
