# Use ccache or sccache when one is installed and the user has chosen nothing.
if(NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER AND NOT DEFINED ENV{CMAKE_CXX_COMPILER_LAUNCHER})
    find_program(MLX_CUDA_COMPILER_CACHE NAMES ccache sccache)
    if(MLX_CUDA_COMPILER_CACHE)
        set(CMAKE_CXX_COMPILER_LAUNCHER "${MLX_CUDA_COMPILER_CACHE}")
    endif()
endif()
