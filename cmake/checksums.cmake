# Checksums of files: XXH3, by the header of xxHash alone. The library links nothing of it.
# A machine with a GPU may lack the header: the programs of ./dev gpu need no files.
find_path(FRUGAL_XXHASH_INCLUDE xxhash.h DOC "The folder of xxhash.h")
mark_as_advanced(FRUGAL_XXHASH_INCLUDE)
if(NOT FRUGAL_XXHASH_INCLUDE)
  if(FRUGAL_TESTS OR NOT FRUGAL_GPU_TOOLS)
    message(FATAL_ERROR "xxhash.h is missing (the Debian package libxxhash-dev). If it is in an "
      "unusual folder: -DFRUGAL_XXHASH_INCLUDE=FOLDER")
  endif()
  message(STATUS "No xxhash.h: no checksums of files, so no checkpoints")
endif()

# For a target that compiles lib/format.
function(frugal_checksums target)
  if(FRUGAL_XXHASH_INCLUDE)
    target_include_directories(${target} SYSTEM PRIVATE ${FRUGAL_XXHASH_INCLUDE})
  else()
    target_compile_definitions(${target} PRIVATE FRUGAL_NO_XXHASH=1)
  endif()
endfunction()
