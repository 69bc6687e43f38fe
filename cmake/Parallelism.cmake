# As many compilations at once as cores and memory allow: MLX's and cudnn_frontend's headers need about 1.5 GB in one compiler, and a
# machine that swaps is slower than one that waits. Only Ninja has job pools; CMAKE_BUILD_PARALLEL_LEVEL stays the user's limit.
cmake_host_system_information(RESULT _cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT _memory QUERY AVAILABLE_PHYSICAL_MEMORY) # MiB
math(EXPR _by_memory "${_memory} / 1536")
set(MLX_CUDA_JOBS ${_cores})
if(_by_memory LESS MLX_CUDA_JOBS)
    set(MLX_CUDA_JOBS ${_by_memory})
endif()
if(MLX_CUDA_JOBS LESS 1)
    set(MLX_CUDA_JOBS 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS compile=${MLX_CUDA_JOBS})
set(CMAKE_JOB_POOL_COMPILE compile)
