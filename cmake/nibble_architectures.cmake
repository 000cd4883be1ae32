# SPDX-License-Identifier: Apache-2.0
# From CUDA architectures to classes of devices; for this tree and for the installed package.

# What nvcc must be told wherever kernels of nibble are compiled. A kernel that two files of a program instantiate must be one
# function: with a stub for each file, the kernel that was preloaded and the one that an inline launcher refers to would be
# different ones.
set(nibble_cuda_options $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-static-global-template-stub=false>)

set(nibble_architecture_pattern "^((80|86|89|90)|(90|100|120)a)(-real|-virtual)?$")

# nibble_native_architectures(<variable>): the architectures of this machine's GPUs, empty where there are none.
function(nibble_native_architectures variable)
  find_program(NIBBLE_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(NIBBLE_NVIDIA_SMI)
  set(capabilities "")
  if(NIBBLE_NVIDIA_SMI)
    execute_process(COMMAND ${NIBBLE_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE answer ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+[.][0-9]" capabilities "${answer}")
  endif()
  list(REMOVE_DUPLICATES capabilities)
  set(architectures "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" number ${capability})
    if(number GREATER_EQUAL 90)
      string(APPEND number a)
    endif()
    list(APPEND architectures ${number})
  endforeach()
  set(${variable} "${architectures}" PARENT_SCOPE)
endfunction()

# nibble_device_classes(<architecture>...): checks them and sets
#   NIBBLE_CLASS_NUMBERS        one number for each class of devices (include/nibble/core/device_class.hpp): 89 90
#   NIBBLE_CLASS_ARCHITECTURES  what each is compiled for: 89 90a
#   NIBBLE_ARCHITECTURE         the class for code that is compiled once for all of them
function(nibble_device_classes)
  set(numbers "")
  set(architectures "")
  set(before_90 OFF)      # no bulk copies
  set(little_memory OFF)  # 99 KiB a block
  foreach(arch IN LISTS ARGN)
    # Blackwell without the architecture suffix has no E2M1 conversion instruction: such a build would
    # silently run the software path, so it is refused.
    if(arch MATCHES "^(1[012][0-9])(-real|-virtual)?$")
      message(FATAL_ERROR "nibble: CUDA architecture ${arch} lacks the 4-bit conversion instructions; "
                          "write ${CMAKE_MATCH_1}a instead")
    endif()
    if(NOT arch MATCHES "${nibble_architecture_pattern}")
      message(FATAL_ERROR "nibble: there are no kernels for CUDA architecture ${arch}; there are for 80, 86 (also for "
                          "8.7), 89, 90a, 100a and 120a")
    endif()
    set(arch ${CMAKE_MATCH_1})
    string(REPLACE "a" "" number ${arch})
    list(FIND numbers ${number} at)
    if(at EQUAL -1)
      list(APPEND numbers ${number})
      list(APPEND architectures ${arch})
    elseif(arch MATCHES "a$")
      list(REMOVE_AT architectures ${at})
      list(INSERT architectures ${at} ${arch})
    endif()
    if(number LESS 90)
      set(before_90 ON)
    endif()
    if(number MATCHES "^(86|89|120)$")
      set(little_memory ON)
    endif()
  endforeach()
  list(LENGTH numbers count)
  if(count EQUAL 1)
    set(common ${numbers})
  elseif(before_90 AND little_memory)
    set(common 86)
  elseif(before_90)
    set(common 80)
  elseif(little_memory)
    set(common 120)
  else()
    set(common 90)
  endif()
  set(NIBBLE_CLASS_NUMBERS ${numbers} PARENT_SCOPE)
  set(NIBBLE_CLASS_ARCHITECTURES ${architectures} PARENT_SCOPE)
  set(NIBBLE_ARCHITECTURE ${common} PARENT_SCOPE)
endfunction()
