#include "all_sum/all_sum.h"

#include "all_sum/params.h"
#include "runtime/device_code.h"
#include "runtime/fused.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"
#include "runtime/status.h"

#include <mlx/distributed/distributed_impl.h>
#include <mlx/distributed/ops.h>
#include <mlx/memory.h>
#include <mlx/ops.h>

#include <algorithm>
#include <utility>

namespace mlx_cuda {

namespace {

static_assert(AllSumParams::kMost == Peers::kMost);

// Whether it takes little to write it to every other GPU.
bool is_small(std::size_t bytes, int count) {
  constexpr std::size_t kMost = 256 << 10;
  return bytes * (count - 1) <= kMost;
}

// Of one array; with another one, which is added to the sum (decoding/fusion/sums.h).
class AllSum final : public Fused {
 public:
  AllSum(const mx::Stream& stream, mx::distributed::Group group, std::shared_ptr<const Peers> peers)
      : Fused(stream), group_(std::move(group)), peers_(std::move(peers)) {}

  DEFINE_NAME(AllSum)

  bool is_equivalent(const mx::Primitive& other) const override {
    return peers_ == static_cast<const AllSum&>(other).peers_;
  }

  const std::shared_ptr<const Peers>& peers() const {
    return peers_;
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const mx::array sum = mx::distributed::all_sum(inputs[0], group_, queue());
    return {inputs.size() == 1 ? sum : mx::add(sum, inputs[1], queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder&) override {
    encode_all_sum(*peers_, inputs[0], inputs.size() == 1 ? std::nullopt : std::optional(inputs[1]), outputs[0], stream());
  }

 private:
  const mx::distributed::Group group_;
  const std::shared_ptr<const Peers> peers_;
};

// The same on all processes, whatever their GPUs are.
std::string refusal_everywhere(const mx::array& x, const mx::distributed::Group& group) {
  const int count = group.size();
  if (count < 2 || count > Peers::kMost) {
    return "there are not 2 to " + std::to_string(Peers::kMost) + " processes";
  }
  if (group.raw_group()->communication_stream().device.type != mx::Device::gpu) {
    return "the group does not run on GPUs";
  }
  if ((!is_half(x.dtype()) && x.dtype() != mx::float32) || x.size() == 0 || !can_copy(x)) {
    return "its dtype is not float16, bfloat16 or float32, it is empty, or it has too many dimensions";
  }
  if (x.nbytes() % 16 != 0 || (!is_small(x.nbytes(), count) && count > 2)) {
    return "its bytes are no multiple of 16, or it is large and there are more than two processes";
  }
  return "";
}

std::string refusal_by_gpu(const mx::array& x, int count, int capability) {
  if (capability < 80) {
    return "the GPU is older than sm_80";
  }
  if (!is_small(x.nbytes(), count) && capability / 10 != 9) {  // measured on Hopper's NVLink
    return "it is large, and the GPUs are not Hopper's";
  }
  return "";
}

}  // namespace

std::string all_sum_refusal(const mx::array& x, const mx::distributed::Group& group) {
  const std::string everywhere = refusal_everywhere(x, group);
  return everywhere.empty() ? refusal_by_gpu(x, group.size(), compute_capability()) : everywhere;
}

MaybeArray all_sum(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream) {
  if (!refusal_everywhere(x, group).empty()) {
    return std::nullopt;
  }
  auto peers = peers_of(group, AllSumParams::bytes(group.size()), stream);
  if (!peers || !refusal_by_gpu(x, peers->count, peers->capability).empty()) {
    return std::nullopt;
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<AllSum>(stream, group, std::move(peers)), {x});
}

std::shared_ptr<const Peers> peers_of_sum(const mx::Primitive& primitive) {
  const auto* sum = dynamic_cast<const AllSum*>(&primitive);
  return sum ? sum->peers() : nullptr;
}

void encode_all_sum(const Peers& peers, const mx::array& x, const MaybeArray& added, mx::array& out, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const bool in_place = x.is_donatable() && x.flags().row_contiguous && on_16_bytes(x);  // before `given` holds it too
  const mx::array given = contiguous_on_16_bytes(x, encoder, stream);
  const MaybeArray residual = contiguous_on_16_bytes(added, encoder, stream);
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
  static constexpr auto table = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_ALL_SUM_KERNELS(MLX_CUDA_KERNEL_ROW)});
  constexpr int warps = AllSumParams::kThreads / 32;
  // So many at most, that those of all streams are resident at once.
  const int resident = peers.multiprocessors * AllSumParams::kBlocksPerMultiprocessor / Peers::kMostStreams;
  const int most = std::min(AllSumParams::kMostBlocks, resident);
  const auto parts = ceil_div<long long>(params.size, AllSumParams::kData);
  params.parts =
      static_cast<int>(std::min<long long>(ceil_div<long long>(parts, most * warps), AllSumParams::most_parts(peers.count)));
  CUfunction kernel = with_pdl(kernels.function(kernel_for(table, type_name(out.dtype()))));
  const auto blocks = std::min<long long>(ceil_div<long long>(parts, params.parts * warps), most);
  node.launch(kernel, dim3(blocks), AllSumParams::kThreads, 0, params);
}

void leave_alone(const std::set<std::shared_ptr<const Peers>>& groups, bool alone, const mx::Stream& stream) {
  if (groups.empty()) {
    return;
  }
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  mx::clear_cache();  // launches allocate outside MLX's cache, and a failed commit drops work
  encoder.commit();   // what comes before it
  for (const auto& peers : groups) {
    MLX_CUDA_CHECK(cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(peers->memory[peers->rank]), alone, 1, encoder.stream()));
  }
}

}  // namespace mlx_cuda
