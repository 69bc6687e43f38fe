// A bounded map that forgets what was used longest ago.
#pragma once

#include <cstddef>
#include <list>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace mlx_cuda {

// Keys are strings of bytes: cheap to hash, and padding cannot make equal keys differ.
class Key {
 public:
  template <typename... Parts>
  explicit Key(const Parts&... parts) {
    bytes_.reserve(256);  // most have fewer
    (add(parts), ...);
  }

  template <typename T>
  void add(const T& value) {
    add(&value, 1);
  }

  template <typename T>
  void add(const T* values, std::size_t count) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(values), count * sizeof(T));
  }

  const std::string& bytes() const {
    return bytes_;
  }

 private:
  std::string bytes_;
};

template <typename Value>
class LruCache {
 public:
  explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

  // The value of the key, or null. It counts as a use.
  Value* find(const Key& key) {
    const auto found = places_.find(key.bytes());
    if (found == places_.end()) {
      return nullptr;
    }
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->second;
  }

  // The value of the key, made by `make` when it is not there. The reference holds until the next call.
  template <typename Make>
  Value& get(const Key& key, Make&& make) {
    if (Value* found = find(key)) {
      return *found;
    }
    entries_.emplace_front(key.bytes(), make());
    places_[key.bytes()] = entries_.begin();
    if (entries_.size() > capacity_) {
      places_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }

 private:
  using Entries = std::list<std::pair<std::string, Value>>;
  std::size_t capacity_;
  Entries entries_;
  std::unordered_map<std::string, typename Entries::iterator> places_;
};

}  // namespace mlx_cuda
