# SPDX-License-Identifier: Apache-2.0
# The CUDA backend is compiled where nvcc 13 is found. The static runtime library loads the driver at
# run time, so that the same binary starts on a machine without one.
set(DISTMOE_CUDA_ENABLED OFF)
if(DISTMOE_WITH_CUDA STREQUAL "OFF")
  return()
endif()
include(CheckLanguage)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(DISTMOE_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DISTMOE_WITH_CUDA=ON, but no CUDA compiler was found")
  endif()
  message(STATUS "No CUDA compiler found: building without the CUDA backend")
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(DISTMOE_CUDA_ENABLED ON)

# A kernel that spills registers does not compile; the test compile.a_spill_is_an_error proves it.
# Compressed for size, kernels take a fifth of the space; they are unpacked once, when they are loaded.
set(DISTMOE_CUDA_FLAGS -gencode=arch=compute_90a,code=sm_90a -lineinfo --compress-mode=size
    --expt-relaxed-constexpr -Xptxas=-warn-spills,-Werror -Xcompiler=-fPIC,-fvisibility=hidden)
add_library(distmoe_cuda_options INTERFACE)
# NOTE: CMake 3.25 knows no later standard of nvcc 13 than C++17; nvcc takes C++20, which the plan's
# code that kernels share is, by its own name. Without extensions CMake would add a standard.
set(CMAKE_CUDA_EXTENSIONS ON)
target_compile_options(distmoe_cuda_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;${DISTMOE_CUDA_FLAGS}>")
