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
  set(cuda_loader nullptr)
  set(cuda_declaration "")
  if(NIBBLE_HAVE_CUDA AND NOT arg_HOST_ONLY)
    set(cuda_loader "${identifier}_cuda_loader()")
    set(cuda_declaration "cuda_loader ${identifier}_cuda_loader();")
    set(device_source ${CMAKE_CURRENT_BINARY_DIR}/compiled/${identifier}.cu)
    file(CONFIGURE OUTPUT ${device_source} @ONLY CONTENT [[
#include "compiled/@identifier@.hpp"
#include "model/cuda_model.cuh"
namespace qwen3_moe::compiled {
@cuda_declaration@
cuda_loader @identifier@_cuda_loader() { return cuda_loader_of<@identifier@>(); }
}  // namespace qwen3_moe::compiled
]])
    target_sources(${arg_TARGET} PRIVATE ${device_source})
  endif()
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "compiled/@identifier@.hpp"
#include "model/host_model.hpp"
namespace qwen3_moe::compiled {
@cuda_declaration@
compiled_model @identifier@_model();
compiled_model @identifier@_model() {
  compiled_model model = compiled_model_of<@identifier@>();
  model.load_cuda = @cuda_loader@;
  return model;
}
}  // namespace qwen3_moe::compiled
]])
  target_sources(${arg_TARGET} PRIVATE ${source} ${header})
  target_include_directories(${arg_TARGET} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  set_property(TARGET ${arg_TARGET} APPEND PROPERTY NIBBLE_MODEL_IDENTIFIERS ${identifier})
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
