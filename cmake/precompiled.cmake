# FRUGAL_PRECOMPILED: the compiler reads headers of the standard library and of GoogleTest once for
# all files. Builds with sanitizers use it: half of their compile time is for such headers, and no
# other build shares their objects. The other builds do not use it, so each file has to include the
# headers that it needs.
option(FRUGAL_PRECOMPILED "Precompile headers of the standard library" OFF)

# For the library's files except the kernels: most of those are compiled for other processors than
# the precompiled header.
function(frugal_precompile_library target)
  if(NOT FRUGAL_PRECOMPILED)
    return()
  endif()
  # Eight files are compiled as one, so the compiler reads the library's own headers less often,
  # too.
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  target_precompile_headers(${target} PRIVATE
    <algorithm> <atomic> <bit> <cerrno> <chrono> <condition_variable> <cstdint> <cstring>
    <functional> <memory> <mutex> <new> <optional> <string> <thread> <utility> <vector>)
endfunction()

# For the programs of this directory that use GoogleTest. `host` is one of them that has no
# compile definitions of its own.
function(frugal_precompile_tests host)
  if(NOT FRUGAL_PRECOMPILED)
    return()
  endif()
  get_target_property(headers ${host} PRECOMPILE_HEADERS)
  if(NOT headers)
    target_precompile_headers(${host} PRIVATE
      <algorithm> <atomic> <chrono> <cmath> <cstdint> <cstring> <functional> <gtest/gtest.h> <map>
      <memory> <mutex> <numeric> <random> <set> <sstream> <string> <thread> <vector>)
  endif()
  get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    if(NOT target STREQUAL host AND "${libraries}" MATCHES "GTest::gtest")
      target_precompile_headers(${target} REUSE_FROM ${host})
    endif()
  endforeach()
endfunction()
