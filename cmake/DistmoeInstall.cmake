# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

# What is installed is relocatable: the command and the libraries look for others beside themselves.
# NOTE: DT_RPATH and not DT_RUNPATH, because scripts/package puts libraries there that say nothing of
# each other's place, and the former alone holds for what a loaded library needs in turn.
file(RELATIVE_PATH library_folder ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
target_link_options(distmoe PRIVATE LINKER:--disable-new-dtags)
set_target_properties(distmoe PROPERTIES INSTALL_RPATH "$ORIGIN")
if(TARGET distmoe_mpi)
  set_target_properties(distmoe_mpi PROPERTIES INSTALL_RPATH "$ORIGIN")
endif()
if(TARGET distmoe_command)
  target_link_options(distmoe_command PRIVATE LINKER:--disable-new-dtags)
  set_target_properties(distmoe_command PROPERTIES INSTALL_RPATH "$ORIGIN/${library_folder}")
endif()

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
