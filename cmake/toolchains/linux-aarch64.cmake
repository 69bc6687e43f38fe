# Compiles for aarch64 Linux on another machine, with the distribution's cross compiler (Debian, Ubuntu: g++-aarch64-linux-gnu).
#
# Python's headers are those of the interpreter that runs the build: its pyconfig.h describes sizes, byte order and features that are
# the same on both processors (CPython 3.11's two differ in four macros, none of which changes the stable ABI that the module uses). A
# distribution's interpreter has a pyconfig.h that includes another one for each processor: it needs that of aarch64, or use another.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# GCC notes for each function that a class passed by value changed its place in GCC 10: MLX's wheels are newer than that.
set(CMAKE_CXX_FLAGS_INIT -Wno-psabi)
