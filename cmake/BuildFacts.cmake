# What only the build knows, for the SBOM (ci/audit/sbom): a JSON file beside the modules. Neither paths nor times are in it, so that
# two builds of one environment stay the same to the byte.

# Add strings to an object of <json>: `place` is the list of names that leads to it, then names and values follow in turn.
function(_mlx_cuda_add_facts json place)
    set(text "${${json}}")
    while(ARGN)
        list(POP_FRONT ARGN name value)
        string(JSON text SET "${text}" ${place} "${name}" "\"${value}\"")
    endwhile()
    set(${json} "${text}" PARENT_SCOPE)
endfunction()

function(mlx_cuda_write_build_facts file)
    set(facts [[{"compiler": {}}]])
    _mlx_cuda_add_facts(facts ""
        platform "${MLX_CUDA_TARGET_PLATFORM}"
        host "${MLX_CUDA_HOST_PLATFORM}"
        cmake "${CMAKE_VERSION}"
        generator "${CMAKE_GENERATOR}"
        nanobind "${nanobind_VERSION}"
    )
    _mlx_cuda_add_facts(facts compiler id "${CMAKE_CXX_COMPILER_ID}" version "${CMAKE_CXX_COMPILER_VERSION}")
    file(CONFIGURE OUTPUT "${file}" CONTENT "${facts}\n" @ONLY NEWLINE_STYLE UNIX)
endfunction()
