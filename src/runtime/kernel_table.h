// Tables of kernels (kernels.h of a folder, or params.h): EACH(name, dtype, what else it is made for...) of each kernel, by its
// whole name. Device code instantiates them, and the host chooses from them; tests/ci/test_kernel_tables.py compares them with the
// symbols of the fatbins.
#pragma once

#include "runtime/status.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <ios>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace mlx_cuda {

template <typename... Made>
struct KernelRow {
  const char* name;
  std::tuple<Made...> made;
};

// A row of a table whose columns are plain values; and no row, for kernels of another table.
#define MLX_CUDA_KERNEL_ROW(name, dtype, ...) {#name, {#dtype __VA_OPT__(, ) __VA_ARGS__}},
#define MLX_CUDA_NO_ROW(...)

// The kernel that is made for exactly this; an error names it.
template <typename... Made, std::size_t N>
const char* kernel_for(const std::array<KernelRow<Made...>, N>& table, const std::type_identity_t<Made>&... made) {
  const std::tuple<Made...> wanted(made...);
  const auto found = std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.made == wanted; });
  if (found == table.end()) {
    std::ostringstream call;
    call << std::boolalpha;
    const auto say = [&call](const auto& each) {
      if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(each)>>) {
        call << ' ' << static_cast<int>(each);
      } else {
        call << ' ' << each;
      }
    };
    (say(made), ...);
    throw Unavailable(std::string("[mlx_cuda] There is no kernel such as ") + table[0].name + " for the values" + call.str() + ".");
  }
  return found->name;
}

}  // namespace mlx_cuda
