# mlx_cuda_add_kernels(<target> <source.cu>...
#   NVRTC <library> NVFATBIN <library> INCLUDES <dir>... SASS <architecture>... PTX <architecture>...)
#
# Compiles each source with NVRTC for every architecture, packs the results into one compressed fatbin and embeds it in <target> as
# `extern const std::uint64_t mlx_cuda_fatbin_<source name>[]`. One command for each source and architecture, so that they run in
# parallel and an edit (of a header too) repeats just what it touches.
function(mlx_cuda_add_kernels target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "NVRTC;NVFATBIN" "INCLUDES;SASS;PTX")
    set(script "${PROJECT_SOURCE_DIR}/cmake/device_code.py")
    set(own_include "${PROJECT_SOURCE_DIR}/src")
    list(TRANSFORM arg_INCLUDES PREPEND "--include=" OUTPUT_VARIABLE includes)
    list(TRANSFORM arg_SASS PREPEND "sm_" OUTPUT_VARIABLE machine_codes)
    list(TRANSFORM arg_PTX PREPEND "compute_" OUTPUT_VARIABLE intermediate_codes)
    foreach(source IN LISTS arg_UNPARSED_ARGUMENTS)
        cmake_path(GET source STEM name)
        cmake_path(ABSOLUTE_PATH source NORMALIZE)
        set(folder "${CMAKE_CURRENT_BINARY_DIR}/device/${target}")
        set(images "")
        foreach(arch IN LISTS machine_codes intermediate_codes)
            if(arch MATCHES "^sm_")
                set(image "${folder}/${name}.${arch}.cubin")
            else()
                set(image "${folder}/${name}.${arch}.ptx")
            endif()
            add_custom_command(
                OUTPUT "${image}"
                COMMAND
                    "${Python_EXECUTABLE}" "${script}" compile "--nvrtc=${arg_NVRTC}" "--arch=${arch}"
                    "--own-include=${own_include}" ${includes} "--depfile=${image}.d" "${source}" "${image}"
                DEPENDS "${source}" "${script}" "${arg_NVRTC}"
                DEPFILE "${image}.d"
                COMMENT "NVRTC ${target} ${name}.cu ${arch}"
                VERBATIM
            )
            list(APPEND images "${image}")
        endforeach()
        set(embedded "${folder}/${name}.fatbin.cpp")
        add_custom_command(
            OUTPUT "${embedded}"
            COMMAND
                "${Python_EXECUTABLE}" "${script}" pack "--nvfatbin=${arg_NVFATBIN}" "--symbol=mlx_cuda_fatbin_${name}"
                "--name=${name}.cu" "${embedded}" ${images}
            DEPENDS ${images} "${script}"
            COMMENT "Packing ${target} ${name}.cu"
            VERBATIM
        )
        target_sources(${target} PRIVATE "${embedded}")
    endforeach()
endfunction()
