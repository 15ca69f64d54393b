# The CUDA kernels. Makes the object libraries in heed_cuda_parts, the definitions that tell plan.c which sources are
# compiled, and heed_cuda_text for the summary. Host code here is C++ without its run-time library; the CUDA runtime is
# linked in, the driver found when a call asks for a device.

set(HEED_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF or AUTO (where there is an nvcc)")
set_property(CACHE HEED_CUDA PROPERTY STRINGS AUTO ON OFF)
set(HEED_CUDA_ARCHITECTURES all CACHE STRING
    "What to compile the CUDA kernels for, in the terms of CMAKE_CUDA_ARCHITECTURES; all: Turing to Blackwell; native: the \
GPUs of this machine, or, where there are none, Turing to Hopper, and PTX for what comes after")
set(HEED_CUDA_FAMILIES "" CACHE STRING
    "Which CUDA kernels to compile beside the portable ones, such as mma;sm90; empty: all")

set(heed_cuda_parts)
if(NOT HEED_CUDA)
    set(heed_cuda_text "none: HEED_CUDA is OFF")
    return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    if(NOT HEED_CUDA STREQUAL AUTO)
        message(FATAL_ERROR "HEED_CUDA is ${HEED_CUDA}, but there is no nvcc. Add it to PATH or set CMAKE_CUDA_COMPILER")
    endif()
    set(heed_cuda_text "none: there is no nvcc, GPUs will not be used")
    return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    if(NOT HEED_CUDA STREQUAL AUTO)
        message(FATAL_ERROR "HEED_CUDA is ${HEED_CUDA}, but nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; expected 12.8 or later")
    endif()
    set(heed_cuda_text "none: nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, 12.8 or later is needed")
    return()
endif()
find_package(CUDAToolkit REQUIRED)
# The level is that of host code, here what surrounds launches; GPUs' code is optimised as far as it goes anyway.
string(REPLACE -O3 -O2 CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")

# Machine code of 8.0 runs on 8.6 and 8.9 and that of 10.0 on 10.3; what comes after gets the PTX of 10.0.
set(architectures ${HEED_CUDA_ARCHITECTURES})
if(architectures STREQUAL native)
    set(architectures ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
    list(TRANSFORM architectures REPLACE "^90-" "90a-")
    list(FILTER architectures INCLUDE REGEX "^(75|[89]|1[0-9][0-9])")
    if(NOT architectures)
        set(architectures 75-real 80-real 90a-real 100-virtual)
    endif()
endif()
if(NOT architectures OR architectures STREQUAL all)
    set(architectures 75-real 80-real 90a-real 100 120-real)
endif()

# Which sources: forward_<family>.cu and backward_<family>.cu are rows of the kernel table, forward_<family>_<part>.cu is
# a part of one, split.cu serves those of that name, the others serve them all. A family is compiled for the chips that it
# runs on, as src/cuda/backend.h says; device and tensor_map have no kernels, and any one chip will do.
set(groups_all mma forward_mma sm90 split small portable rows turing host) # the longest to compile first
set(chips_mma "^[89a-z]|^1[0-9][0-9]")
set(chips_forward_mma ${chips_mma})
set(chips_small "^[89a-z]|^1[0-9][0-9]")
set(chips_turing "^75|^8[0-9]|^90|^[a-z]")
set(chips_split "^8[0-9]|^90|^[a-z]")
set(chips_sm90 "^90a")
foreach(group IN LISTS groups_all)
    set(sources_${group})
    set(architectures_${group} ${architectures})
    if(chips_${group})
        list(FILTER architectures_${group} INCLUDE REGEX "${chips_${group}}")
    endif()
endforeach()
list(GET architectures 0 architectures_host)
# Turing's kernels run on later chips in tests alone. Those get PTX, where Turing itself is compiled for.
if(architectures_turing MATCHES "^75-real;")
    set(architectures_turing 75)
endif()

# Chips for which the sources of a group say the same share one PTX, that of the oldest, of which each gets machine code of
# its own: PTX takes longer to make than machine code of it.
set(alike_rows "100 120")
set(alike_portable "80 90" "100 120")
set(alike_forward_mma "80 90" "100 120")
set(alike_mma "100 120")
set(alike_small "100 120")
foreach(group IN LISTS groups_all)
    foreach(chips IN LISTS alike_${group})
        separate_arguments(chips)
        set(oldest)
        foreach(chip IN LISTS chips)
            set(found ${architectures_${group}})
            list(FILTER found INCLUDE REGEX "^${chip}a?(-real)?$")
            if(NOT oldest)
                string(REGEX REPLACE "-real" "" oldest "${found}")
            elseif(found MATCHES "-real$")
                list(REMOVE_ITEM architectures_${group} ${found})
                list(APPEND flags_${group} -gencode=arch=compute_${oldest},code=sm_${chip})
            endif()
        endforeach()
    endforeach()
endforeach()
set(rows)
set(families ${HEED_CUDA_FAMILIES}) # with those whose functions they call
if(families MATCHES "sm90(fused|scores|split)")
    list(APPEND families sm90)
endif()
if(families MATCHES "sm90split")
    list(APPEND families split)
endif()
file(GLOB all_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
foreach(source IN LISTS all_sources)
    cmake_path(GET source STEM name)
    set(group rows)
    if(name MATCHES "^(device|tensor_map)$")
        set(group host)
    elseif(name STREQUAL split)
        set(group split)
    elseif(name MATCHES "^(forward|backward)_([^_]+)")
        set(row ${CMAKE_MATCH_0})
        set(family ${CMAKE_MATCH_2})
        string(REGEX REPLACE "^(sm90|split).*" "\\1" group ${family})
        if(row IN_LIST groups_all) # where the two have not as much in common
            set(group ${row})
        endif()
        set(has 1)
        if(NOT architectures_${group})
            set(has 0)
        elseif(families AND NOT family IN_LIST families AND NOT family STREQUAL portable)
            set(has 0)
        endif()
        list(APPEND rows HEED_HAS_${row}=${has})
        if(NOT has)
            continue()
        endif()
    endif()
    list(APPEND sources_${group} ${source})
endforeach()
list(REMOVE_DUPLICATES rows)
target_compile_definitions(heed_host PRIVATE HEED_HAS_CUDA ${rows})

include(CheckCompilerFlag)
check_compiler_flag(CUDA --compress-mode=balance HEED_NVCC_COMPRESSES) # to a third more than `size`, in a 60th of its time

# What ptxas says of each kernel, its registers and spills, goes to a file beside the object: the target `registers`
# prints it, and a test of that name fails on spills.
function(heed_add_cuda_part name architectures)
    add_library(${name} OBJECT ${ARGN})
    target_include_directories(${name} PRIVATE include src)
    target_compile_features(${name} PRIVATE cuda_std_17)
    target_compile_options(${name} PRIVATE
        -Xcompiler=-Wall,-Wextra,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics # the statics are those of launch
        $<$<BOOL:${HEED_WERROR}>:-Werror=all-warnings>                             # stubs, which nothing calls
        --diag-suppress=177 # a function that only some chips' code uses
        $<$<BOOL:${HEED_NVCC_COMPRESSES}>:--compress-mode=balance> -Xfatbin=-compress-all
        -Xptxas=-v)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_RUNTIME_LIBRARY Static
        CUDA_VISIBILITY_PRESET hidden CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/keep_report)
    set(heed_cuda_parts ${heed_cuda_parts} ${name} PARENT_SCOPE)
endfunction()
foreach(group IN LISTS groups_all)
    if(sources_${group} AND architectures_${group})
        heed_add_cuda_part(heed_cuda_${group} "${architectures_${group}}" ${sources_${group}})
        target_compile_options(heed_cuda_${group} PRIVATE ${flags_${group}})
    endif()
endforeach()

add_custom_target(registers COMMAND ${PROJECT_SOURCE_DIR}/tests/test_registers.sh ${PROJECT_BINARY_DIR} VERBATIM)
add_dependencies(registers ${heed_cuda_parts})
list(JOIN architectures " " heed_cuda_text)
if(families)
    list(REMOVE_DUPLICATES families)
    list(JOIN families " " families)
    string(APPEND heed_cuda_text ", only portable ${families}")
endif()
