# SPDX-License-Identifier: Apache-2.0
# Invariant: an installed distmoe is complete: a project that only knows find_package(distmoe) builds
# and runs, from a prefix that is not the one it was configured for.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR}/prefix ${WORK_DIR}/build)
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
run(${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${CXX_FLAGS}
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -DEXPECTED_VERSION=${VERSION})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)

execute_process(COMMAND ${WORK_DIR}/build/consumer OUTPUT_VARIABLE output
                COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
message("${output}")
if(NOT output MATCHES "rank 1 token 5 y\\[0\\] = -?[0-9]+\\.[0-9]+\n$")
  message(FATAL_ERROR "the consumer printed something else than the example")
endif()
