# The declared matrix (ci/matrix/matrix.toml) and the provisioned toolkit roots, as CMake variables:
#
#   for each CUDA version V, written 12_8 for 12.8: MLX_CUDA_<V>_{MODULE,RPATH,ROOT,MLX_ROOT,CUDNN_FRONTEND}
function(_mlx_cuda_python output)
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -m ${ARGN}
        WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
        OUTPUT_VARIABLE printed
        ERROR_VARIABLE complaint
        RESULT_VARIABLE status
        OUTPUT_STRIP_TRAILING_WHITESPACE
    )
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${complaint}")
    endif()
    set(${output} "${printed}" PARENT_SCOPE)
endfunction()

macro(mlx_cuda_read_matrix)
    set(_file "${CMAKE_CURRENT_BINARY_DIR}/matrix.cmake")
    _mlx_cuda_python(_printed ci.build.cmake "--output=${_file}" "--platform=${MLX_CUDA_PLATFORM}" --cuda ${MLX_CUDA_VERSIONS})
    include("${_file}")
    # An edit of the data, or of what reads it, configures again.
    file(GLOB _readers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/ci/matrix/*.py")
    set_property(
        DIRECTORY
        APPEND
        PROPERTY
            CMAKE_CONFIGURE_DEPENDS
                "${PROJECT_SOURCE_DIR}/ci/matrix/matrix.toml"
                ${_readers}
                "${PROJECT_SOURCE_DIR}/ci/build/cmake.py"
    )
endmacro()

# Refuse a compiler that ci/matrix/matrix.toml does not declare.
function(mlx_cuda_check_compiler)
    if(NOT MLX_CUDA_ANY_COMPILER)
        _mlx_cuda_python(_said ci.build.compiler "${CMAKE_CXX_COMPILER_ID}" "${CMAKE_CXX_COMPILER_VERSION}" "${MLX_CUDA_PLATFORM}")
    endif()
endfunction()

# The headers and the library of MLX for one CUDA version, as <output>_INCLUDE and <output>_LIBRARY.
function(mlx_cuda_find_mlx output root)
    if(MLX_CUDA_SYSTEM_MLX)
        find_path(MLX_INCLUDE_DIR mlx/mlx.h REQUIRED)
        find_library(MLX_LIBRARY mlx REQUIRED)
        set(include "${MLX_INCLUDE_DIR}")
        set(library "${MLX_LIBRARY}")
    else()
        set(include "${root}/include")
        find_library(library mlx PATHS "${root}/lib" REQUIRED NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
    endif()
    file(STRINGS "${include}/mlx/version.h" parts REGEX "define MLX_VERSION_(MAJOR|MINOR|PATCH) ")
    list(TRANSFORM parts REPLACE ".* " "")
    list(JOIN parts "." version)
    if(NOT version VERSION_EQUAL MLX_CUDA_MLX_VERSION)
        message(
            FATAL_ERROR
            "MLX ${version} in ${include} is not the MLX ${MLX_CUDA_MLX_VERSION} that this version is written for; its C++ ABI "
            "changes inside patch releases."
        )
    endif()
    set(${output}_INCLUDE "${include}" PARENT_SCOPE)
    set(${output}_LIBRARY "${library}" PARENT_SCOPE)
endfunction()
