# The CUDA part: sets FRUGAL_WITH_CUDA, and adds frugal_kernels, the object of the kernels.
#
# It needs a compiler of CUDA 13 or later: that of CMAKE_CUDA_COMPILER or CUDACXX, or one on the
# path or in /usr/local/cuda. The library also works without a GPU or its driver: the run-time
# library is linked statically, and it loads the driver's library when a device is opened.
set(FRUGAL_CUDA AUTO CACHE STRING "CUDA devices: ON, OFF, or AUTO: if there is a compiler for them")
set_property(CACHE FRUGAL_CUDA PROPERTY STRINGS AUTO ON OFF)
set(FRUGAL_WITH_CUDA OFF)

if(FRUGAL_CUDA STREQUAL "AUTO" OR FRUGAL_CUDA)
  find_program(FRUGAL_NVCC nvcc HINTS $ENV{CUDA_PATH}/bin $ENV{CUDA_HOME}/bin
    PATHS /usr/local/cuda/bin NO_CMAKE_FIND_ROOT_PATH)
  mark_as_advanced(FRUGAL_NVCC)
  if(CMAKE_CUDA_COMPILER)
    set(nvcc ${CMAKE_CUDA_COMPILER})
  elseif(DEFINED ENV{CUDACXX})
    set(nvcc $ENV{CUDACXX})
  else()
    set(nvcc ${FRUGAL_NVCC})
  endif()
  set(version 0)
  if(nvcc)
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(text MATCHES "release ([0-9]+\\.[0-9]+)")
      set(version ${CMAKE_MATCH_1})
    endif()
  endif()
  if(version VERSION_GREATER_EQUAL 13.0)
    set(FRUGAL_WITH_CUDA ON)
    set(CMAKE_CUDA_COMPILER ${nvcc} CACHE FILEPATH "Compiler for CUDA devices")
  elseif(FRUGAL_CUDA STREQUAL "AUTO")
    message(STATUS "No compiler of CUDA 13 or later: no CUDA devices")
  else()
    message(FATAL_ERROR "FRUGAL_CUDA=${FRUGAL_CUDA} wants nvcc of CUDA 13 or later; found: "
      "${nvcc}, version ${version}. CMAKE_CUDA_COMPILER is its path.")
  endif()
endif()

if(FRUGAL_WITH_CUDA)
  # Machine code of every generation that CUDA 13 knows, and PTX for those to come.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90-real 100-real 120 CACHE STRING
      "GPU architectures")
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not have it
  endif()
  if(CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
  endif()
  # By hand: find_package(CUDAToolkit) needs the shared run-time library, too.
  find_path(FRUGAL_CUDA_INCLUDE cuda_runtime_api.h REQUIRED NO_CMAKE_FIND_ROOT_PATH
    HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  find_library(FRUGAL_CUDART cudart_static REQUIRED NO_CMAKE_FIND_ROOT_PATH
    HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES})
  mark_as_advanced(FRUGAL_CUDA_INCLUDE FRUGAL_CUDART)

  # The arithmetic of docs/arithmetic.md; the last three are nvcc's defaults, named to be explicit.
  # Sanitizers are for the host's code, of which kernels.cu has none.
  add_library(frugal_cuda_flags INTERFACE)
  target_compile_options(frugal_cuda_flags INTERFACE
    -fmad=false -prec-div=true -prec-sqrt=true -ftz=false)
  target_include_directories(frugal_cuda_flags INTERFACE
    ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/lib)

  add_library(frugal_kernels OBJECT ${CMAKE_SOURCE_DIR}/lib/device/cuda/kernels.cu)
  target_link_libraries(frugal_kernels PRIVATE frugal_cuda_flags)
  set_target_properties(frugal_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON
    CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endif()
