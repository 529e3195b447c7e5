# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

install(DIRECTORY include/distmoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS distmoe EXPORT distmoeTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET distmoe_mpi)
  install(TARGETS distmoe_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET distmoe_command)
  install(TARGETS distmoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(EXPORT distmoeTargets NAMESPACE distmoe:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distmoe)
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/distmoeConfig.cmake.in ${PROJECT_BINARY_DIR}/distmoeConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distmoe)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/distmoeConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/distmoeConfig.cmake ${PROJECT_BINARY_DIR}/distmoeConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distmoe)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
