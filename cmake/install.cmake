# What `cmake --install` gives: the library, two headers, a CMake package and a pkg-config file.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(TARGETS frugal EXPORT frugalTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES include/frugal.h include/frugal.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(FRUGAL_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/frugal)
install(EXPORT frugalTargets NAMESPACE frugal:: DESTINATION ${FRUGAL_PACKAGE_DIR})
configure_package_config_file(cmake/frugalConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/frugalConfig.cmake INSTALL_DESTINATION ${FRUGAL_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/frugalConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
# Relative, so that an installed tree can be moved.
file(RELATIVE_PATH FRUGAL_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/frugal.pc.in ${CMAKE_CURRENT_BINARY_DIR}/frugal.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/frugalConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/frugalConfigVersion.cmake DESTINATION ${FRUGAL_PACKAGE_DIR})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/frugal.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
