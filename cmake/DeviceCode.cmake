# mlx_cuda_add_device_code(<target> PYTHON <interpreter> ARCHITECTURES <names>...)
#
# The device code as one step: `python -m ci.device` compiles what its store lacks (ci/device), on all cores, and writes a packed fatbin for
# each source and a manifest into <build>/device, and the manifest's digest into a header, by which a module knows its device code.
# What depends on <target> waits, so that device and host code do not compete for the cores.
function(mlx_cuda_add_device_code target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "PYTHON" "ARCHITECTURES")
    set(folder "${CMAKE_CURRENT_BINARY_DIR}/device")
    set(header "${CMAKE_CURRENT_BINARY_DIR}/include/mlx_cuda_device_code.h")
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*.cu")
    file(GLOB program CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/ci/device/*.py" "${PROJECT_SOURCE_DIR}/ci/matrix/*.py")
    add_custom_command(
        OUTPUT "${folder}/manifest.json" "${header}"
        COMMAND
            "${arg_PYTHON}" -m ci.device --arch ${arg_ARCHITECTURES} --output "${folder}" --header "${header}" --depfile
            "${folder}.d"
        DEPENDS
            ${sources}
            ${program}
            "${PROJECT_SOURCE_DIR}/ci/matrix/matrix.toml"
            "${PROJECT_SOURCE_DIR}/ci/toolkit/locks/device.txt"
        DEPFILE "${folder}.d"
        WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
        COMMENT "Device code"
        USES_TERMINAL
        VERBATIM
    )
    add_custom_target(${target} DEPENDS "${folder}/manifest.json" "${header}")
    install(
        DIRECTORY "${folder}/"
        DESTINATION "${PROJECT_NAME}/device"
        FILES_MATCHING
        PATTERN "*.fatbin.lzma"
        PATTERN "manifest.json"
    )
endfunction()
