#include "all_sum/all_sum.h"

#include "all_sum/params.h"
#include "runtime/device_code.h"
#include "runtime/early.h"
#include "runtime/fused.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/distributed/ops.h>
#include <mlx/distributed/primitives.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace mlx_cuda {

namespace {

static_assert(AllSumParams::kMost == Peers::kMost);

bool in_letters(std::size_t bytes, int count) {
  return bytes % AllSumParams::kBytes == 0 && bytes / AllSumParams::kBytes * (count - 1) <= AllSumParams::kMostLetters;
}

class AllSum final : public Fused {
 public:
  AllSum(const mx::Stream& stream, mx::distributed::Group group, std::shared_ptr<const Peers> peers)
      : Fused(stream), group_(std::move(group)), peers_(std::move(peers)) {}

  DEFINE_NAME(AllSum)

  bool is_equivalent(const mx::Primitive& other) const override {
    return peers_ == static_cast<const AllSum&>(other).peers_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

  const mx::distributed::Group& group() const {
    return group_;
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    return {mx::distributed::all_sum(inputs[0], group_, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder&) override {
    encode_all_sum(*peers_, inputs[0], std::nullopt, outputs[0], stream());
  }

 private:
  const mx::distributed::Group group_;
  const std::shared_ptr<const Peers> peers_;
};

// What all processes say alike, whatever their GPUs are.
std::string refusal_everywhere(const mx::array& x, int count) {
  if (count < 2 || count > Peers::kMost) {
    return "there are not 2 to " + std::to_string(Peers::kMost) + " processes";
  }
  if ((!is_half(x.dtype()) && x.dtype() != mx::float32) || x.size() == 0) {
    return "its dtype is not float16, bfloat16 or float32, or it is empty";
  }
  return "";
}

std::string refusal_by_gpu(const mx::array& x, int count, int capability) {
  if (capability < 80) {
    return "the GPU is older than sm_80";
  }
  // What is large crosses the links once for each other GPU, where a ring's crosses them twice at most; measured on Hopper's
  // NVLink.
  if (!in_letters(x.nbytes(), count) && (count > 2 || capability / 10 != 9 || x.nbytes() % 16 != 0)) {
    return "it is large, and not of two GPUs of Hopper's";
  }
  return "";
}

}  // namespace

std::string all_sum_refusal(const mx::array& x, const mx::distributed::Group& group) {
  const std::string everywhere = refusal_everywhere(x, group.size());
  return everywhere.empty() ? refusal_by_gpu(x, group.size(), compute_capability()) : everywhere;
}

std::shared_ptr<const Peers> peers_for(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream) {
  if (!refusal_everywhere(x, group.size()).empty()) {
    return nullptr;
  }
  auto peers = peers_of(group, AllSumParams::bytes(group.size()), stream);
  return peers && refusal_by_gpu(x, peers->count, peers->capability).empty() ? peers : nullptr;
}

void encode_all_sum(
    const Peers& peers, const mx::array& x, const std::optional<mx::array>& added, mx::array& out, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const auto readable = [&](const mx::array& in) {
    return on_16_bytes(in) ? contiguous(in, encoder, stream) : contiguous_copy(in, encoder, stream);
  };
  const bool in_place = x.is_donatable() && x.flags().row_contiguous && on_16_bytes(x);  // before `given` holds it too
  const mx::array given = readable(x);
  const auto residual = added ? std::optional(readable(*added)) : std::nullopt;
  if (in_place) {
    out.copy_shared_buffer(x);  // each thread reads what it writes before it does
  } else {
    allocate(out, stream);
  }
  AllSumParams params{};
  KernelNode node(encoder);
  params.x = node.reads(given);
  params.added = node.reads(residual);
  params.out = node.writes(out);
  encoder.set_output_array(peers.turn);  // after the sum before, whatever that is of
  std::copy(peers.memory.begin(), peers.memory.end(), params.memory);
  params.rank = peers.rank;
  params.count = peers.count;
  params.size = static_cast<long long>(x.nbytes());
  static KernelModule kernels("all_sum");
  const bool letters = in_letters(x.nbytes(), peers.count);
  CUfunction kernel = kernels.function((letters ? "all_sum_" : "all_sum_pieces_") + type_name(out.dtype()));
  begins_early(kernel);
  if (letters) {
    const auto blocks = ceil_div<long long>(params.size, AllSumParams::kBytes * AllSumParams::kThreads);
    node.launch(kernel, dim3(blocks), AllSumParams::kThreads, 0, params);
  } else {
    const auto blocks = std::min<long long>(ceil_div<long long>(params.size, AllSumParams::kPiece), AllSumParams::kPieceBlocks);
    node.launch(kernel, dim3(blocks), AllSumParams::kPieceThreads, 0, params);
  }
}

std::optional<mx::array> all_sum(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream) {
  auto peers = peers_for(x, group, stream);
  return peers ? std::optional(result_of<AllSum>({x}, x.dtype(), stream, group, peers)) : std::nullopt;
}

std::optional<mx::distributed::Group> group_of_sum(const mx::Primitive& primitive) {
  if (const auto* own = dynamic_cast<const AllSum*>(&primitive)) {
    return own->group();
  }
  if (std::string_view(primitive.name()) == "Sum AllReduce") {
    return static_cast<const mx::distributed::DistPrimitive&>(primitive).group();
  }
  return std::nullopt;
}

}  // namespace mlx_cuda
