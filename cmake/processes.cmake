# Trainers as processes: sets FRUGAL_WITH_PROCESSES, and adds the control plane to the library.
# Cap'n Proto encodes its messages, and the manifests of checkpoints. Without Cap'n Proto the
# library has everything else.
set(FRUGAL_PROCESSES AUTO CACHE STRING
  "Trainers as processes: ON, OFF, or AUTO: if there is Cap'n Proto")
set_property(CACHE FRUGAL_PROCESSES PROPERTY STRINGS AUTO ON OFF)
set(FRUGAL_WITH_PROCESSES OFF)

if(FRUGAL_PROCESSES STREQUAL "AUTO" OR FRUGAL_PROCESSES)
  find_package(CapnProto 0.8 QUIET)  # or any later one; built with 0.9.2
  if(CapnProto_FOUND)
    set(FRUGAL_WITH_PROCESSES ON)
  elseif(FRUGAL_PROCESSES STREQUAL "AUTO")
    message(STATUS "No Cap'n Proto of version 0.8 or later: no trainers as processes")
  else()
    message(FATAL_ERROR "FRUGAL_PROCESSES=${FRUGAL_PROCESSES} wants Cap'n Proto 0.8 or later "
      "(the Debian packages capnproto and libcapnp-dev)")
  endif()
endif()

# Chooses the sources that need Cap'n Proto, or else those that replace them.
function(frugal_process_sources list)
  set(sources ${${list}})
  if(FRUGAL_WITH_PROCESSES)
    list(FILTER sources EXCLUDE REGEX "/lib/(process/control|format/manifest)_none\\.cpp$")
    set(CAPNPC_OUTPUT_DIR ${CMAKE_BINARY_DIR}/schema)
    file(MAKE_DIRECTORY ${CAPNPC_OUTPUT_DIR})
    foreach(schema process/control format/manifest)
      get_filename_component(CAPNPC_SRC_PREFIX ${CMAKE_SOURCE_DIR}/lib/${schema} DIRECTORY)
      capnp_generate_cpp(generated headers ${CMAKE_SOURCE_DIR}/lib/${schema}.capnp)
      list(APPEND sources ${generated} ${headers})
    endforeach()
  else()
    list(FILTER sources EXCLUDE
      REGEX "/lib/(process/control_(message|server|client|structs)|format/manifest)\\.cpp$")
  endif()
  set(${list} ${sources} PARENT_SCOPE)
endfunction()
