# SPDX-License-Identifier: Apache-2.0
# cmake -DCOMPILE=<compiler;options;-c;source> -DOUT=<folder> -P spill_is_an_error.cmake
execute_process(COMMAND ${COMPILE} -o ${OUT}/no_spill.o RESULT_VARIABLE status ERROR_VARIABLE text
                OUTPUT_VARIABLE text)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the kernel does not compile with enough registers:\n${text}")
endif()
execute_process(COMMAND ${COMPILE} -DMIN_BLOCKS=2 -o ${OUT}/spill.o RESULT_VARIABLE status
                ERROR_VARIABLE text OUTPUT_VARIABLE text)
if(status EQUAL 0)
  message(FATAL_ERROR "a kernel that spills compiled:\n${text}")
endif()
if(NOT text MATCHES "[Ss]pill")
  message(FATAL_ERROR "the kernel did not compile for another reason than spills:\n${text}")
endif()
