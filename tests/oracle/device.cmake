# The one-thread reference, and the oracle on devices. ./dev gpu builds these two without the other
# tests.
include_guard(GLOBAL)
set(tests ${CMAKE_CURRENT_LIST_DIR}/..)

# It includes the header and nothing else of the library.
add_library(frugal_reference STATIC ${tests}/reference/reference.cpp)
target_include_directories(frugal_reference PUBLIC ${tests} ${CMAKE_SOURCE_DIR}/include)
target_link_libraries(frugal_reference PUBLIC frugal_flags)

# It gets memory of a device from lib/device/runtime.h, so it is linked with the library's objects.
set(oracle_sources oracle.cpp checkpoints.cpp driver.cpp processes.cpp replay.cpp script.cpp)
list(TRANSFORM oracle_sources PREPEND ${tests}/oracle/)
add_library(frugal_oracle OBJECT ${oracle_sources})
target_link_libraries(frugal_oracle PUBLIC frugal_reference)
add_executable(oracle_device ${tests}/oracle/device.cpp ${tests}/oracle/far.cpp)
target_link_libraries(oracle_device
  PRIVATE frugal_oracle frugal_objects frugal_sim frugal_reference)
