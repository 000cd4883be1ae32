# SPDX-License-Identifier: Apache-2.0
# Headers, targets and the package file: find_package(nibble) gives nibble::nibble, nibble::host and, where the
# consumer has CUDA, nibble::cuda.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/nibble DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT nibble
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS nibble nibble_host EXPORT nibble-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT nibble)
install(EXPORT nibble-targets NAMESPACE nibble:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/nibble COMPONENT nibble)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/nibble-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/nibble-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/nibble)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/nibble-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/nibble-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/nibble-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/nibble_architectures.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/nibble COMPONENT nibble)
