# SPDX-License-Identifier: Apache-2.0
# The library's targets, and what nibble's own targets have in common.

add_library(nibble INTERFACE)
add_library(nibble::nibble ALIAS nibble)
target_include_directories(nibble INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                            $<INSTALL_INTERFACE:include>)
target_compile_features(nibble INTERFACE cxx_std_20)

if(NIBBLE_SANITIZE)
  string(REPLACE ";" "," nibble_sanitizers "${NIBBLE_SANITIZE}")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${nibble_sanitizers}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer> $<$<COMPILE_LANGUAGE:CXX>:-g1>)
  add_link_options(-fsanitize=${nibble_sanitizers})
endif()

if(NIBBLE_BUILD_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)  # coverage of the libraries, not of the targets alone
endif()

# nibble_own_target(<target>): warnings, warnings as errors, C++20 without extensions.
function(nibble_own_target target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor -Woverloaded-virtual>)
  # g++ 12 reports impossible overlaps inside std::string (GCC bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
  if(NIBBLE_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
endfunction()

# nibble_model_program(<target>): for a .cu file with structs of a model in it. nvcc hides kernels, and g++ remarks that such a
# struct is more visible than its fields' types, which means nothing in a program.
function(nibble_model_program target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-attributes>)
endfunction()

# The fast CPU kernels: SIMD with run-time dispatch, so they are compiled, not header-only.
file(GLOB nibble_host_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/nibble/host/*.cpp)
if(nibble_host_sources)
  find_package(hwy REQUIRED)
  find_package(Threads REQUIRED)
  add_library(nibble_host STATIC ${nibble_host_sources})
  add_library(nibble::host ALIAS nibble_host)
  set_target_properties(nibble_host PROPERTIES EXPORT_NAME host POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(nibble_host PUBLIC nibble::nibble Threads::Threads PRIVATE hwy::hwy)
  # A result must not depend on which products a compiler chooses to fuse.
  target_compile_options(nibble_host PRIVATE -ffp-contract=off)
  nibble_own_target(nibble_host)
endif()
