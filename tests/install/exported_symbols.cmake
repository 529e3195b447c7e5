# SPDX-License-Identifier: Apache-2.0
# Invariant: the shared library exports names of the public headers and the standard library's own
# templates, nothing else: internals and third parties (oneDNN, JSON) stay inside.
execute_process(COMMAND ${NM} -DC --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols
                COMMAND_ERROR_IS_FATAL ANY)
file(GLOB headers ${INCLUDE_DIR}/distmoe/*.hpp)
set(public "")
foreach(header ${headers})
  file(READ ${header} text)
  string(APPEND public "${text}")
endforeach()

# Brackets and semicolons mean something in a CMake list; [abi:cxx11] is no part of a name.
string(REPLACE "[abi:cxx11]" "" symbols "${symbols}")
string(REGEX REPLACE "[];[]" "" symbols "${symbols}")
string(REGEX REPLACE "\n" ";" symbols "${symbols}")
set(leaked "")
set(num_checked 0)
foreach(symbol ${symbols})
  string(REGEX REPLACE "^[0-9a-f]+ [A-Za-z] " "" name "${symbol}")
  string(REGEX REPLACE "^(vtable|typeinfo|typeinfo name) for " "" name "${name}")
  if(name MATCHES "^distmoe::([A-Za-z_0-9]+)")
    math(EXPR num_checked "${num_checked} + 1")
    if(NOT public MATCHES "[^A-Za-z_0-9]${CMAKE_MATCH_1}[^A-Za-z_0-9]")
      string(APPEND leaked "\n  ${name}")
    endif()
  elseif(NOT name MATCHES "(^| )(std|__gnu_cxx)|^(guard variable for|_init|_fini)")
    string(APPEND leaked "\n  ${name}")
  endif()
endforeach()
if(leaked OR num_checked LESS 20)
  message(FATAL_ERROR "of ${num_checked} exported names of distmoe these are not public:${leaked}")
endif()
