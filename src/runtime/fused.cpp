#include "runtime/fused.h"

#include "runtime/status.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mlx_cuda {

namespace {

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// A function of the inputs `argnums` only, and these: the others are constants to it, which may have no derivatives.
std::pair<Function, std::vector<mx::array>> of_some(
    const Function& compose, const std::vector<mx::array>& primals, const std::vector<int>& argnums) {
  std::vector<mx::array> points;
  for (const int argnum : argnums) {
    points.push_back(primals[argnum]);
  }
  const auto function = [=](const std::vector<mx::array>& values) {
    std::vector<mx::array> inputs = primals;
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      inputs[argnums[i]] = values[i];
    }
    return compose(inputs);
  };
  return {function, points};
}

// What has been encoded may write to them.
void hold_until_run(const std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) {
  for (const mx::array& out : outputs) {
    if (out.data_shared_ptr()) {
      encoder.add_temporary(out);
    }
  }
}

// Adds to the encoder what gives an array from those that are there, for the primitive's own stream, as MLX's evaluation does: what
// is read is held until it has run, but for what its reader has taken over.
void encode_graph(mx::array& of, mx::cu::CommandEncoder& encoder) {
  if (!of.has_primitive() || of.status() != mx::array::Status::unscheduled) {
    return;
  }
  for (mx::array& in : of.inputs()) {
    encode_graph(in, encoder);
  }
  std::vector<mx::array> outputs = of.outputs();
  of.primitive().eval_gpu(of.inputs(), outputs);
  for (const mx::array& in : of.inputs()) {
    if (in.data_shared_ptr() && in.data_shared_ptr() != of.data_shared_ptr()) {
      encoder.add_temporary(in);
    }
  }
  for (mx::array& out : outputs) {
    out.set_status(mx::array::Status::evaluated);
  }
  hold_until_run(of.siblings(), encoder);
  of.detach();
}

// After an error: what has been encoded so far may use memory that goes with the graph.
void run_to_end(const std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  try {
    hold_until_run(outputs, encoder);
    mx::synchronize(stream);
  } catch (const std::exception&) {
    return;  // the first error is the one to be told
  }
}

std::function<void(const Unavailable&)>& handler() {
  static auto& handle = *new std::function<void(const Unavailable&)>;
  return handle;
}

}  // namespace

void on_unavailable(std::function<void(const Unavailable&)> handle) {
  handler() = std::move(handle);
}

bool are_available(const std::function<void()>& ask) {
  try {
    ask();
    return true;
  } catch (const Unavailable& error) {
    if (handler()) {
      handler()(error);
    }
    return false;
  }
}

void Fused::eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(std::string("[") + name() + "] This primitive runs on a GPU only.");
}

void Fused::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cu::get_command_encoder(stream());
  encoder.device().make_current();
  try {
    try {
      encode(inputs, outputs, encoder);
    } catch (const Unavailable& error) {
      if (!is_composable()) {
        throw;
      }
      hold_until_run(outputs, encoder);
      std::vector<mx::array> composed = compose(inputs);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        encode_graph(composed[i], encoder);
        outputs[i].copy_shared_buffer(composed[i]);
      }
      if (handler()) {
        handler()(error);
      }
    }
  } catch (...) {
    run_to_end(outputs, encoder, stream());
    throw;
  }
}

std::vector<mx::array> Fused::jvp(
    const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents, const std::vector<int>& argnums) {
  const auto [function, points] = of_some([this](const auto& inputs) { return compose(inputs); }, primals, argnums);
  return mx::jvp(function, points, tangents).second;
}

std::vector<mx::array> Fused::vjp(
    const std::vector<mx::array>& primals,
    const std::vector<mx::array>& cotangents,
    const std::vector<int>& argnums,
    const std::vector<mx::array>&) {
  const auto [function, points] = of_some([this](const auto& inputs) { return compose(inputs); }, primals, argnums);
  return mx::vjp(function, points, cotangents).second;
}

std::pair<std::vector<mx::array>, std::vector<int>> Fused::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  auto composition = [this](const std::vector<mx::array>& in) { return compose(in); };
  std::vector<mx::array> outputs = mx::vmap(composition, axes)(inputs);
  std::vector<int> first(outputs.size(), 0);
  return {std::move(outputs), std::move(first)};
}

std::pair<std::vector<mx::array>, std::vector<int>> vmap_in_turn(
    const std::vector<mx::array>& inputs,
    const std::vector<int>& axes,
    const std::function<mx::array(const std::vector<mx::array>&)>& apply,
    const mx::Stream& stream) {
  const auto batched = std::find_if(axes.begin(), axes.end(), [](int axis) { return axis >= 0; }) - axes.begin();
  std::vector<mx::array> results;
  for (int entry = 0; entry < inputs[batched].shape(axes[batched]); ++entry) {
    std::vector<mx::array> own;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      own.push_back(axes[i] < 0 ? inputs[i] : mx::take(inputs[i], entry, axes[i], stream));
    }
    results.push_back(apply(own));
  }
  return {{mx::stack(results, 0, stream)}, {0}};
}

}  // namespace mlx_cuda
