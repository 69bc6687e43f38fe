#include "decoding/append/append.h"

#include "decoding/graph/step_primitive.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/pdl.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

namespace mlx_cuda {

namespace {

KernelModule kernels("step");
constexpr auto kQuantized = std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_STEP_APPEND_KERNELS(MLX_CUDA_KERNEL_ROW)});

class Append final : public StepPrimitive {
 public:
  using StepPrimitive::StepPrimitive;

  const char* name() const override {
    return kCacheAppend;
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    AppendParams params{};
    params.batch = inputs[0].shape(0);
    params.heads = inputs[0].shape(1);
    params.capacity = inputs[2].shape(2);
    const mx::array rows[2] = {
        with_adjacent_elements(inputs[0], encoder, stream()), with_adjacent_elements(inputs[1], encoder, stream())};
    KernelNode node(encoder);
    params.where = node.reads<int>(inputs[4]);
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
    const int lanes = params.batch * params.heads * longest / 2;
    node.launch(
        kernels.function("step_append"), dim3(ceil_div(lanes, AppendParams::kThreads), 2), AppendParams::kThreads, 0, params);
  }
};

class QuantizedAppend final : public StepPrimitive {
 public:
  QuantizedAppend(const mx::Stream& stream, QuantizedAppendForm form) : StepPrimitive(stream), form_(form) {}

  const char* name() const override {
    return kQuantizedCacheAppend;
  }

  QuantizedAppendForm form() const {
    return form_;
  }

  // Inputs: keys, values, the six arrays of the memory, and the position.
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    QuantizedAppendParams params{};
    params.batch = inputs[0].shape(0);
    params.heads = inputs[0].shape(1);
    params.capacity = inputs[2].shape(2);
    const mx::array rows[2] = {
        with_adjacent_elements(inputs[0], encoder, stream()), with_adjacent_elements(inputs[1], encoder, stream())};
    KernelNode node(encoder);
    params.where = node.reads<int>(inputs[8]);
    params.to = quantized_rows({inputs.begin() + 2, inputs.begin() + 8}, outputs, form_.group, node);
    for (int i = 0; i < 2; ++i) {
      params.rows[i] = node.reads(rows[i]);
      params.distances[i][0] = rows[i].strides(0);
      params.distances[i][1] = rows[i].strides(1);
    }
    CUfunction kernel = with_pdl(kernels.function(kernel_for(kQuantized, type_name(rows[0].dtype()), form_.bits)));
    const int warps = 2 * params.batch * params.heads;
    node.launch(kernel, dim3(ceil_div(warps, QuantizedAppendParams::kWarps)), 32 * QuantizedAppendParams::kWarps, 0, params);
  }

 private:
  QuantizedAppendForm form_;
};

class Replace final : public StepPrimitive {
 public:
  Replace(const mx::Stream& stream, Arrays to) : StepPrimitive(stream), to_(std::move(to)) {}

  const char* name() const override {
    return kCacheReplace;
  }

  // The inputs are the result and the new arrays: whatever reads the old ones leads to one of them, and so comes before.
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    outputs[0].copy_shared_buffer(inputs[0]);
    Arrays from;
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      from.push_back(contiguous_on_16_bytes(inputs[i], encoder, stream()));
    }
    for (std::size_t first = 0; first < from.size(); first += ReplaceParams::kMost) {
      KernelNode node(encoder);
      for (const mx::array& in : inputs) {
        node.reads(in);
      }
      ReplaceParams params{};
      const std::size_t count = std::min<std::size_t>(from.size() - first, ReplaceParams::kMost);
      std::size_t longest = 0;
      for (std::size_t i = 0; i < count; ++i) {
        params.from[i] = node.reads(from[first + i]);
        params.to[i] = node.writes(to_[first + i]);
        params.bytes[i] = static_cast<long long>(from[first + i].nbytes());
        longest = std::max(longest, from[first + i].nbytes());
      }
      const std::size_t units = ceil_div<std::size_t>(longest, 16 * ReplaceParams::kThreads);
      node.launch(
          kernels.function("step_replace"), dim3(std::min<std::size_t>(units, ReplaceParams::kMostBlocks), count),
          ReplaceParams::kThreads, 0, params);
    }
  }

 private:
  Arrays to_;
};

// Outputs are all inputs but the keys and values, which come first, and the last, which says where these go.
Arrays appended(std::shared_ptr<mx::Primitive> primitive, const Arrays& inputs) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (auto part = inputs.begin() + 2; part != inputs.end() - 1; ++part) {
    shapes.push_back(part->shape());
    dtypes.push_back(part->dtype());
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), inputs);
}

}  // namespace

mx::array cache_replace(const mx::array& result, const Arrays& from, const Arrays& to, const mx::Stream& stream) {
  Arrays inputs{result};
  inputs.insert(inputs.end(), from.begin(), from.end());
  return {result.shape(), result.dtype(), std::make_shared<Replace>(stream, to), std::move(inputs)};
}

QuantizedAppendForm quantized_append_form(const mx::array& out) {
  return static_cast<const QuantizedAppend&>(out.primitive()).form();
}

QuantizedRows quantized_rows(const Arrays& memory, Arrays& outputs, int group, KernelNode& node) {
  QuantizedRows to{};
  to.group = group;
  for (int i = 0; i < 6; ++i) {
    outputs[i].copy_shared_buffer(memory[i]);
    node.reads(memory[i]);
  }
  for (int i = 0; i < 2; ++i) {
    to.dims[i] = memory[3 * i + 1].shape(3) * group;
    to.packed[i] = node.writes(outputs[3 * i]);
    to.scales[i] = node.writes(outputs[3 * i + 1]);
    to.biases[i] = node.writes(outputs[3 * i + 2]);
  }
  return to;
}

Arrays cache_append(const Arrays& inputs, const mx::Stream& stream) {
  return appended(std::make_shared<Append>(stream), inputs);
}

Arrays quantized_cache_append(const Arrays& inputs, QuantizedAppendForm form, const mx::Stream& stream) {
  return appended(std::make_shared<QuantizedAppend>(stream, form), inputs);
}

}  // namespace mlx_cuda
