# What `cmake --install` installs: the library, two headers, a CMake package, a pkg-config file and
# the license.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(TARGETS frugal EXPORT frugalTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES include/frugal.h include/frugal.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(FRUGAL_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/frugal)
install(EXPORT frugalTargets NAMESPACE frugal:: DESTINATION ${FRUGAL_PACKAGE_DIR})
configure_package_config_file(cmake/frugalConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/frugalConfig.cmake INSTALL_DESTINATION ${FRUGAL_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/frugalConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
# frugal.pc has folders inside the prefix relative to it, and the prefix relative to the file, so an
# installed tree can be moved.
foreach(dir LIBDIR INCLUDEDIR)
  set(folder ${CMAKE_INSTALL_${dir}})
  cmake_path(IS_PREFIX CMAKE_INSTALL_PREFIX "${folder}" NORMALIZE inside)
  if(inside)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}")
  endif()
  set(FRUGAL_PC_${dir} ${folder})
  if(NOT IS_ABSOLUTE "${folder}")
    set(FRUGAL_PC_${dir} "\${prefix}/${folder}")
  endif()
endforeach()
if(IS_ABSOLUTE "${FRUGAL_PC_LIBDIR}")
  set(FRUGAL_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
else()
  string(REPLACE "\${prefix}" "" folder "${FRUGAL_PC_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH FRUGAL_PC_PREFIX ${folder} /)
  string(PREPEND FRUGAL_PC_PREFIX "\${pcfiledir}/")
endif()
configure_file(cmake/frugal.pc.in ${CMAKE_CURRENT_BINARY_DIR}/frugal.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/frugalConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/frugalConfigVersion.cmake DESTINATION ${FRUGAL_PACKAGE_DIR})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/frugal.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
