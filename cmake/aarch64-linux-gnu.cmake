# SPDX-License-Identifier: Apache-2.0
# Toolchain file of scripts/arm64-check: Debian's cross compiler, its own C and C++ libraries, and
# everything else from DISTMOE_ARM64_ROOT, a folder of unpacked arm64 packages.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES DISTMOE_ARM64_ROOT)
set(CMAKE_FIND_ROOT_PATH ${DISTMOE_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_CXX_FLAGS_INIT "-isystem ${DISTMOE_ARM64_ROOT}/usr/include")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,-rpath-link,${DISTMOE_ARM64_ROOT}/usr/lib/aarch64-linux-gnu")
