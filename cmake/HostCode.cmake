# How host code is compiled, said once for the library that all native modules share and for what each has of its own.
#
# mlx_cuda_host_code(<target> TOOLKIT <root> MLX <include> CUDNN_FRONTEND <root>)
function(mlx_cuda_host_code target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TOOLKIT;MLX;CUDNN_FRONTEND" "")
    target_include_directories(${target} PRIVATE src)
    # The SDK's headers are not ours to warn about. MLX's headers want cccl's and CUTLASS's only in device code.
    target_include_directories(
        ${target}
        SYSTEM
        PRIVATE
            src/compat
            third_party
            "${CMAKE_CURRENT_BINARY_DIR}/include"
            "${arg_MLX}"
            "${arg_CUDNN_FRONTEND}/include"
            "${arg_TOOLKIT}/include"
    )
    target_compile_definitions(${target} PRIVATE NV_CUDNN_FRONTEND_DISABLE_LOGGING CUDNN_FRONTEND_SKIP_JSON_LIB)
    if(MSVC)
        # Stated one by one, also what CMake or nanobind would give anyway: nothing else here says what MSVC is given.
        #   /utf-8                        sources are UTF-8, whatever the machine's locale
        #   /permissive- /Zc:__cplusplus  the standard's rules, and the version macro that goes with them
        #   /Zc:preprocessor              the standard's preprocessor, which CCCL asks for
        #   /bigobj                       cudnn_frontend's and nanobind's templates make more sections than an object file takes otherwise
        #   /wd4244 /wd4267               narrowing in MLX's inline functions, which MLX's own CMake package asks its users to silence
        #   /Brepro                       a hash in the place of the time stamp: the same sources give the same bytes
        target_compile_options(
            ${target}
            PRIVATE /O2 /EHsc /utf-8 /W3 /permissive- /Zc:__cplusplus /Zc:preprocessor /bigobj /wd4244 /wd4267 /Brepro
        )
        target_compile_definitions(
            ${target}
            PRIVATE NOMINMAX= WIN32_LEAN_AND_MEAN _SILENCE_CXX20_OLD_SHARED_PTR_ATOMIC_SUPPORT_DEPRECATION_WARNING
        )
    else()
        # g++ names a system header by its real path where that is shorter, and a cache directory is often reached through a link.
        file(REAL_PATH "${MLX_CUDA_TOOLKITS}" real_toolkits)
        target_compile_options(
            ${target}
            PRIVATE
                -O2 # not CMake's -O3, which makes the modules larger: the time goes into kernels
                -Wall
                -Wextra
                "$<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=524288>" # KiB: below that, freeing memory costs more than it saves
                "-ffile-prefix-map=${PROJECT_SOURCE_DIR}=."
                "-ffile-prefix-map=${CMAKE_CURRENT_BINARY_DIR}=build"
                "-ffile-prefix-map=${MLX_CUDA_TOOLKITS}=toolkits"
                "-ffile-prefix-map=${real_toolkits}=toolkits"
                "-ffile-prefix-map=${nanobind_ROOT}=nanobind"
        )
    endif()
    set_target_properties(
        ${target}
        PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON
    )
    add_dependencies(${target} device_code)
endfunction()

# An object library that is compiled as <module>, a target of nanobind's, before that has anything of its own.
function(mlx_cuda_add_shared_host_code target module)
    add_library(${target} OBJECT ${ARGN})
    foreach(property COMPILE_DEFINITIONS COMPILE_OPTIONS)
        get_target_property(value ${module} ${property})
        if(value)
            set_target_properties(${target} PROPERTIES ${property} "${value}")
        endif()
    endforeach()
    get_target_property(includes ${module} INCLUDE_DIRECTORIES)
    if(includes)
        target_include_directories(${target} SYSTEM PRIVATE ${includes})
    endif()
    get_target_property(libraries ${module} LINK_LIBRARIES)
    if(libraries)
        target_link_libraries(${target} PRIVATE ${libraries}) # for their headers and definitions
    endif()
    # What most sources include, over a third of the time of one. Not on Windows: there it was not tried, and a missing include is noticed.
    # A compiler cache keeps nothing that has such a header.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT WIN32 AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
        target_precompile_headers(
            ${target}
            PRIVATE <algorithm> <map> <mlx/ops.h> <mlx/primitives.h> <mlx/backend/cuda/device.h> <mlx/backend/cuda/utils.h>
        )
    endif()
endfunction()
