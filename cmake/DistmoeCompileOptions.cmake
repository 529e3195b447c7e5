# SPDX-License-Identifier: Apache-2.0
# One interface target carries every compile option of the project's own code.

add_library(distmoe_options INTERFACE)
target_compile_features(distmoe_options INTERFACE cxx_std_20)
# NOTE: the numerics contract allows a product and a sum to contract only where the code says fma.
# Nothing reads errno or floating-point exception flags, and loops with selects vectorise without them.
target_compile_options(distmoe_options INTERFACE
  -ffp-contract=off -fno-math-errno -fno-trapping-math)

if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(distmoe_options INTERFACE
    -Wall -Wextra -Wpedantic -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor
    $<$<CXX_COMPILER_ID:GNU>:-Wshadow=local> -Werror)
  # NOTE: GCC 12 sees overlaps in std::string concatenation that cannot be (its bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(distmoe_options INTERFACE -Wno-restrict)
  endif()
endif()
if(DISTMOE_SANITIZE)
  target_compile_options(distmoe_options INTERFACE
    -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  target_link_options(distmoe_options INTERFACE -fsanitize=address,undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # NOTE: GCC bug 105562: under the address sanitizer <regex> seems to read what it has not set.
    target_compile_options(distmoe_options INTERFACE -Wno-maybe-uninitialized)
  endif()
  target_compile_definitions(distmoe_options INTERFACE DISTMOE_SANITIZED=1)
endif()
if(DISTMOE_FUZZ)
  target_compile_options(distmoe_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
