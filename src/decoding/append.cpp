#include "decoding/append.h"

#include "decoding/params.h"
#include "decoding/recorded.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <algorithm>
#include <memory>

namespace mlx_cuda {

namespace {

class Append final : public Recorded {
 public:
  using Recorded::Recorded;

  const char* name() const override {
    return kCacheAppend;
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    AppendParams params{};
    params.batch = inputs[0].shape(0);
    params.heads = inputs[0].shape(1);
    params.capacity = inputs[2].shape(2);
    std::vector<mx::array> rows;
    for (int i = 0; i < 2; ++i) {
      rows.push_back(with_adjacent_elements(inputs[i], encoder, stream()));
    }
    KernelNode node(encoder);
    params.place = node.reads<int>(inputs[4]);
    int longest = 0;
    for (int i = 0; i < 2; ++i) {
      const int bytes = static_cast<int>(rows[i].itemsize());
      outputs[i].copy_shared_buffer(inputs[2 + i]);
      params.rows[i] = node.reads(rows[i]);
      node.reads(inputs[2 + i]);
      params.caches[i] = node.writes(outputs[i]);
      params.distances[i][0] = rows[i].strides(0) * bytes;
      params.distances[i][1] = rows[i].strides(1) * bytes;
      params.row_bytes[i] = rows[i].shape(3) * bytes;
      longest = std::max(longest, params.row_bytes[i]);
    }
    static KernelModule kernels("step");
    const int lanes = params.batch * params.heads * longest / 2;
    node.launch(
        kernels.function("step_append"), dim3(ceil_div(lanes, AppendParams::kThreads), 2), AppendParams::kThreads, 0, params);
  }
};

}  // namespace

std::vector<mx::array> cache_append(const std::vector<mx::array>& inputs, const mx::Stream& stream) {
  return mx::array::make_arrays(
      {inputs[2].shape(), inputs[3].shape()}, {inputs[2].dtype(), inputs[3].dtype()}, std::make_shared<Append>(stream), inputs);
}

}  // namespace mlx_cuda
