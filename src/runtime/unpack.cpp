#include "runtime/unpack.h"

#include <lzma/LzmaDec.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace mlx_cuda {

namespace {

// An LZMA file: properties with the size of the dictionary, the size unpacked, the stream.
constexpr std::size_t kProperties = LZMA_PROPS_SIZE;
constexpr std::size_t kFileHeader = kProperties + sizeof(std::uint64_t);
constexpr std::uint64_t kLargest = 1 << 28;  // as the audit's

// A fatbin (ci/wheelfile/binary/fatbin.py has its layout).
constexpr std::size_t kContainerHeader = 16;
constexpr std::size_t kEntryHeader = 64;
enum Kind : std::uint16_t { kPtx = 1, kSass = 2 };
constexpr std::uint64_t kArchitectureSpecific = 0x100000;  // "a": for one compute capability

[[noreturn]] void damaged(const char* what) {
  throw std::runtime_error(
      std::string("[mlx_cuda] The device code is damaged: ") + what +
      ". Reinstall mlx-cuda; `python -m mlx_cuda doctor` says how.");
}

void* allocate(ISzAllocPtr, std::size_t size) {
  return std::malloc(size);
}
void release(ISzAllocPtr, void* memory) {
  std::free(memory);
}
constexpr ISzAlloc kHeap{allocate, release};

template <class T>
T value_at(std::string_view bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(T));  // little-endian, as every host of CUDA
  return value;
}

const Byte* as_bytes(std::string_view text) {
  return reinterpret_cast<const Byte*>(text.data());
}

// A stream of LZMA, decoded up to the last byte that was asked for.
class Stream {
 public:
  explicit Stream(std::string_view file) {
    if (file.size() < kFileHeader || value_at<std::uint64_t>(file, kProperties) > kLargest) {
      damaged("it is no LZMA file");
    }
    unpacked_.resize(value_at<std::uint64_t>(file, kProperties));
    rest_ = file.substr(kFileHeader);
    LzmaDec_CONSTRUCT(&state_) if (LzmaDec_AllocateProbs(&state_, as_bytes(file), kProperties, &kHeap) != SZ_OK) {
      damaged("its LZMA properties are not valid");
    }
    state_.dic = reinterpret_cast<Byte*>(unpacked_.data());
    state_.dicBufSize = unpacked_.size();
    LzmaDec_Init(&state_);
  }
  ~Stream() {
    LzmaDec_FreeProbs(&state_, &kHeap);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::size_t size() const {
    return unpacked_.size();
  }

  // So many bytes from here on.
  std::string_view bytes(std::size_t begin, std::size_t count) {
    if (begin > size() || count > size() - begin) {
      damaged("it ends inside a fatbin");
    }
    if (const std::size_t end = begin + count; end > state_.dicPos) {
      SizeT taken = rest_.size();
      ELzmaStatus status{};
      const SRes result = LzmaDec_DecodeToDic(&state_, end, as_bytes(rest_), &taken, LZMA_FINISH_ANY, &status);
      if (result != SZ_OK || state_.dicPos != end) {
        damaged("its LZMA stream is not valid");
      }
      rest_.remove_prefix(taken);
    }
    return std::string_view(unpacked_).substr(begin, count);
  }

 private:
  std::string unpacked_{};
  std::string_view rest_{};
  CLzmaDec state_{};
};

// As _loader/device_code.py, which tells of it: SASS runs on its family from its own GPU on, PTX on every GPU from its own on.
bool runs(std::string_view entry, int capability) {
  const auto kind = value_at<std::uint16_t>(entry, 0);
  const auto own = static_cast<int>(value_at<std::uint32_t>(entry, 28));
  if (value_at<std::uint64_t>(entry, 40) & kArchitectureSpecific) {
    return own == capability;
  }
  return own <= capability && (kind == kPtx || (kind == kSass && own / 10 == capability / 10));
}

}  // namespace

std::string unpack_code(std::string_view packed, int capability) {
  Stream stream(packed);
  stream.bytes(0, kContainerHeader);
  // SASS comes before PTX, and the newest first of each: the first that runs is the best.
  for (std::size_t at = kContainerHeader; at < stream.size();) {
    const std::string_view entry = stream.bytes(at, kEntryHeader);
    const std::size_t header = value_at<std::uint32_t>(entry, 4);
    if (header < kEntryHeader) {
      damaged("an entry of its fatbin has no header");
    }
    const std::string_view code = stream.bytes(at + header, value_at<std::uint64_t>(entry, 8));
    if (runs(entry, capability)) {
      return std::string(code);
    }
    at += header + code.size();
  }
  return {};
}

}  // namespace mlx_cuda
