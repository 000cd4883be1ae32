# SPDX-License-Identifier: Apache-2.0
# Decides whether device code is compiled, says so, and offers nibble::cuda.

include(nibble_architectures)

set(NIBBLE_HAVE_CUDA OFF)
if(NOT NIBBLE_CUDA STREQUAL "off")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(NIBBLE_NVCC nvcc PATHS /usr/local/cuda/bin /opt/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
    mark_as_advanced(NIBBLE_NVCC)
    if(NIBBLE_NVCC)
      set(CMAKE_CUDA_COMPILER ${NIBBLE_NVCC})
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
  endif()
  # Nothing said: this machine's GPUs, as far as there are kernels for them, or an H200.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    nibble_native_architectures(CMAKE_CUDA_ARCHITECTURES)
    list(FILTER CMAKE_CUDA_ARCHITECTURES INCLUDE REGEX "${nibble_architecture_pattern}")
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a)
    endif()
  elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    nibble_native_architectures(CMAKE_CUDA_ARCHITECTURES)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      message(FATAL_ERROR "nibble: CMAKE_CUDA_ARCHITECTURES is native, but nvidia-smi shows no GPU on this machine; name the "
                          "GPU that the program is for: 80 (A100), 86 (RTX 30), 89 (RTX 40), 90a (H100, H200), 100a (B200), "
                          "120a (RTX 50), or build for the CPU alone with -DNIBBLE_CUDA=off")
    endif()
  endif()
  nibble_device_classes(${CMAKE_CUDA_ARCHITECTURES})
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 13 QUIET)
    if(CUDAToolkit_FOUND)
      set(NIBBLE_HAVE_CUDA ON)
    endif()
  endif()
  if(NIBBLE_CUDA STREQUAL "on" AND NOT NIBBLE_HAVE_CUDA)
    message(FATAL_ERROR "nibble: NIBBLE_CUDA is on, but no nvcc of CUDA 13 or newer was found; "
                        "set CMAKE_CUDA_COMPILER, or NIBBLE_CUDA=auto for a build without device code")
  endif()
endif()

if(NIBBLE_HAVE_CUDA)
  message(STATUS "nibble: device code on, CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
  add_library(nibble_cuda INTERFACE)
  add_library(nibble::cuda ALIAS nibble_cuda)
  set_target_properties(nibble_cuda PROPERTIES EXPORT_NAME cuda)
  target_link_libraries(nibble_cuda INTERFACE nibble::nibble CUDA::cudart_static)
  target_compile_definitions(nibble_cuda INTERFACE NIBBLE_ARCHITECTURE=${NIBBLE_ARCHITECTURE})
  # Only 90a has the warpgroup instructions, and only the build knows whether there is such code.
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
    target_compile_definitions(nibble_cuda INTERFACE NIBBLE_WGMMA=1)
  endif()
  # A kernel that two files of a program instantiate must be one function: with a stub for each file, the kernel that was
  # preloaded and the one that an inline launcher refers to would be different ones.
  target_compile_options(nibble_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-static-global-template-stub=false>)
  # Its code then makes g++ complain that a model's structs are more visible than their fields' types, which means nothing in
  # a program.
  target_compile_options(nibble_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-attributes>)
  # CMake before 3.28 knows no C++20 for nvcc 13 and would emit no -std flag at all.
  if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(nibble_cuda INTERFACE cuda_std_20)
  else()
    target_compile_options(nibble_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  endif()
elseif(NIBBLE_CUDA STREQUAL "off")
  message(STATUS "nibble: host-only build, NIBBLE_CUDA is off")
else()
  message(STATUS "nibble: host-only build, no CUDA 13 compiler found")
endif()
