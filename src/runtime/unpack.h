// The device code of a source as the package holds it: a fatbin in one stream of LZMA (ci/device/packed.py).
#pragma once

#include <string>
#include <string_view>

namespace mlx_cuda {

// The code that a GPU of this compute capability gets, such as 90: a cubin or PTX, as the driver takes it; empty where there is
// none. Decodes no more of the stream than that code needs. A std::runtime_error says what is damaged.
std::string unpack_code(std::string_view packed, int capability);

}  // namespace mlx_cuda
