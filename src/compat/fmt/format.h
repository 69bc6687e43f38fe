// MLX's headers use fmt for one error message and its wheels do not carry fmt. This is the one function that they need; std::format
// would do, but needs GCC 13.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace fmt {

template <typename... Args>
std::string format(std::string_view pattern, const Args&... args) {
  std::ostringstream out;
  auto put_one = [&](const auto& value) {
    const auto hole = pattern.find("{}");
    out << pattern.substr(0, hole);
    if (hole != std::string_view::npos) {
      out << value;
      pattern.remove_prefix(hole + 2);
    } else {
      pattern = {};
    }
  };
  (put_one(args), ...);
  out << pattern;
  return out.str();
}

}  // namespace fmt
