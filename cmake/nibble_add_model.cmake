# SPDX-License-Identifier: Apache-2.0
# nibble_add_model(<name> CONFIG <path/to/config.json> [TARGET <library>] [HOST_ONLY])
# Compiles the model of a Hugging Face config.json into <library>, by default the qwen3-moe server's, for the
# host and, unless HOST_ONLY, for the GPU where there is a compiler for it. A path that is not absolute is taken
# from the current source folder.
function(nibble_add_model name)
  cmake_parse_arguments(arg "HOST_ONLY" "CONFIG;TARGET" "" ${ARGN})
  if(NOT arg_CONFIG)
    message(FATAL_ERROR "nibble_add_model(${name}): CONFIG names no config.json")
  endif()
  if(NOT arg_TARGET)
    set(arg_TARGET qwen3_moe_models)
  endif()
  get_filename_component(config ${arg_CONFIG} ABSOLUTE)
  if(NOT EXISTS ${config})
    message(FATAL_ERROR "nibble_add_model(${name}): ${config} does not exist; correct it, or clear the list with -DNIBBLE_MODELS=")
  endif()
  string(MAKE_C_IDENTIFIER ${name} identifier)
  get_target_property(known ${arg_TARGET} NIBBLE_MODEL_IDENTIFIERS)
  if(identifier IN_LIST known)
    message(FATAL_ERROR "nibble_add_model(${name}): ${arg_TARGET} has a model of this name already; rename the folder "
                        "of ${config}, or leave it out if the model is the same")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${config})
  set(header ${CMAKE_CURRENT_BINARY_DIR}/compiled/${identifier}.hpp)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/compiled/${identifier}.cpp)
  add_custom_command(OUTPUT ${header}
    COMMAND qwen3_moe_generate_config ${name} ${identifier} ${config} ${header}
    DEPENDS qwen3_moe_generate_config ${config} COMMENT "Model ${name} from ${config}" VERBATIM)
  # One source file for each class of devices, all at once in the registry's row.
  set(loaders "")
  set(builds "")
  if(NIBBLE_HAVE_CUDA AND NOT arg_HOST_ONLY)
    foreach(number arch IN ZIP_LISTS NIBBLE_CLASS_NUMBERS NIBBLE_CLASS_ARCHITECTURES)
      set(loader qwen3_moe_${identifier}_sm_${number})
      set(device_source ${CMAKE_CURRENT_BINARY_DIR}/compiled/${identifier}_sm_${number}.cu)
      file(CONFIGURE OUTPUT ${device_source} @ONLY CONTENT [[
#include "compiled/@identifier@.hpp"
#include "model/cuda_model.cuh"
extern "C" qwen3_moe::cuda_loader @loader@();
extern "C" qwen3_moe::cuda_loader @loader@() {
  return qwen3_moe::cuda_loader_of<qwen3_moe::compiled::@identifier@, nibble::device_class_of(@number@)>();
}
]])
      nibble_add_device_code(${arg_TARGET} ${loader} ${arch} ${device_source} ${header})
      string(APPEND loaders "extern \"C\" qwen3_moe::cuda_loader ${loader}();\n")
      string(APPEND builds "{nibble::device_class_of(${number}), ${loader}()}, ")
    endforeach()
  endif()
  if(builds)
    set(builds "  static const cuda_build builds[] = {${builds}};\n  model.cuda = builds;\n")
  endif()
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "compiled/@identifier@.hpp"
#include "model/host_model.hpp"
@loaders@namespace qwen3_moe::compiled {
compiled_model @identifier@_model();
compiled_model @identifier@_model() {
  compiled_model model = compiled_model_of<@identifier@>();
@builds@  return model;
}
}  // namespace qwen3_moe::compiled
]])
  target_sources(${arg_TARGET} PRIVATE ${source} ${header})
  target_include_directories(${arg_TARGET} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  set_property(TARGET ${arg_TARGET} APPEND PROPERTY NIBBLE_MODEL_IDENTIFIERS ${identifier})
endfunction()

# nibble_add_device_code(<library> <function> <architecture> <source> <header>): the source into the library, compiled
# for one architecture.
#
# With several architectures a kernel that two of them share has two host-side names that mean different machine code,
# and templates that launch it would be merged by the linker: so everything in the object but <function> becomes local.
function(nibble_add_device_code target function arch source header)
  list(LENGTH NIBBLE_CLASS_NUMBERS count)
  if(count EQUAL 1)
    target_sources(${target} PRIVATE ${source})
    return()
  endif()
  set(code ${function}_code)
  add_library(${code} OBJECT ${source} ${header})
  add_dependencies(${target} ${code})  # so that the header is made once
  set_target_properties(${code} PROPERTIES CUDA_ARCHITECTURES ${arch}-real)
  target_link_libraries(${code} PRIVATE qwen3_moe_model)
  target_include_directories(${code} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  nibble_own_target(${code})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${code} PRIVATE -Xcompiler=-fno-gnu-unique)  # unique symbols cannot be made local
  endif()
  set(object ${CMAKE_CURRENT_BINARY_DIR}/compiled/${function}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_LINKER} -r --force-group-allocation -o ${object} $<TARGET_OBJECTS:${code}>
    COMMAND ${CMAKE_OBJCOPY} --keep-global-symbol=${function} ${object}
    DEPENDS ${code} $<TARGET_OBJECTS:${code}> COMMENT "Device code ${function}" COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  target_sources(${target} PRIVATE ${object})
endfunction()

# nibble_write_registry(<library> <function>): a source file with `std::span<const compiled_model> function()`
# over the models added to the library so far.
function(nibble_write_registry target function)
  get_target_property(identifiers ${target} NIBBLE_MODEL_IDENTIFIERS)
  set(declarations "")
  set(calls "")
  foreach(identifier IN LISTS identifiers)
    string(APPEND declarations "compiled_model ${identifier}_model();\n")
    string(APPEND calls "compiled::${identifier}_model(), ")
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/compiled/${function}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "model/registry.hpp"
namespace qwen3_moe {
namespace compiled {
@declarations@}  // namespace compiled
std::span<const compiled_model> @function@();
std::span<const compiled_model> @function@() {
  static const compiled_model models[] = {@calls@};
  return models;
}
}  // namespace qwen3_moe
]])
  target_sources(${target} PRIVATE ${source})
endfunction()
