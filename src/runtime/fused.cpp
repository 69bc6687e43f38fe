#include "runtime/fused.h"

#include "runtime/status.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <stdexcept>

namespace mlx_cuda {

namespace {

using Function = std::function<Arrays(const Arrays&)>;

// A function of only the inputs `argnums`, and these: the others are constants, which may not be differentiable.
std::pair<Function, Arrays> of_some(const Function& compose, const Arrays& primals, const std::vector<int>& argnums) {
  Arrays points;
  for (const int argnum : argnums) {
    points.push_back(primals[argnum]);
  }
  const auto function = [=](const Arrays& values) {
    Arrays inputs = primals;
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      inputs[argnums[i]] = values[i];
    }
    return compose(inputs);
  };
  return {function, points};
}

// Encoded work may write to them.
void hold_until_run(const Arrays& outputs, CommandEncoder& encoder) {
  for (const mx::array& out : outputs) {
    if (out.data_shared_ptr()) {
      encoder.add_temporary(out);
    }
  }
}

// Encodes the computation of an array from evaluated ones, on the primitive's own stream, as MLX's evaluation does: inputs are
// kept until it has run, except those that were donated.
void encode_graph(mx::array& of, CommandEncoder& encoder) {
  if (!of.has_primitive() || of.status() != mx::array::Status::unscheduled) {
    return;
  }
  for (mx::array& in : of.inputs()) {
    encode_graph(in, encoder);
  }
  Arrays outputs = of.outputs();
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
void run_to_end(const Arrays& outputs, CommandEncoder& encoder, const mx::Stream& stream) {
  try {
    hold_until_run(outputs, encoder);
    mx::synchronize(stream);
  } catch (const std::exception&) {
    return;  // only the first error is reported
  }
}

std::function<void(const Unavailable&)>& handler() {
  static auto& handle = *new std::function<void(const Unavailable&)>([](const Unavailable&) {});
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
    handler()(error);
    return false;
  }
}

void Fused::eval_cpu(const Arrays&, Arrays&) {
  throw std::runtime_error(std::string("[") + name() + "] This primitive runs on a GPU only.");
}

void Fused::eval_gpu(const Arrays& inputs, Arrays& outputs) {
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
      Arrays composed = compose(inputs);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        encode_graph(composed[i], encoder);
        outputs[i].copy_shared_buffer(composed[i]);
      }
      handler()(error);
    }
  } catch (...) {
    run_to_end(outputs, encoder, stream());
    throw;
  }
}

Arrays Fused::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) {
  const auto [function, points] = of_some([this](const auto& inputs) { return compose(inputs); }, primals, argnums);
  return mx::jvp(function, points, tangents).second;
}

Arrays Fused::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) {
  const auto [function, points] = of_some([this](const auto& inputs) { return compose(inputs); }, primals, argnums);
  return mx::vjp(function, points, cotangents).second;
}

std::pair<Arrays, std::vector<int>> Fused::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  auto composition = [this](const Arrays& in) { return compose(in); };
  Arrays outputs = mx::vmap(composition, axes)(inputs);
  std::vector<int> first(outputs.size(), 0);
  return {std::move(outputs), std::move(first)};
}

std::pair<Arrays, std::vector<int>> vmap_in_turn(
    const Arrays& inputs,
    const std::vector<int>& axes,
    const std::function<mx::array(const Arrays&)>& apply,
    const mx::Stream& stream) {
  const auto batched = std::find_if(axes.begin(), axes.end(), [](int axis) { return axis >= 0; }) - axes.begin();
  Arrays results;
  for (int entry = 0; entry < inputs[batched].shape(axes[batched]); ++entry) {
    Arrays own;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      own.push_back(axes[i] < 0 ? inputs[i] : mx::take(inputs[i], entry, axes[i], stream));
    }
    results.push_back(apply(own));
  }
  return {{mx::stack(results, 0, stream)}, {0}};
}

std::pair<Arrays, std::vector<int>> vmap_as_batch(
    const Arrays& inputs,
    const std::vector<int>& axes,
    const std::function<Arrays(const Arrays&)>& apply,
    const mx::Stream& stream) {
  const auto mapped = std::find_if(axes.begin(), axes.end(), [](int axis) { return axis >= 0; }) - axes.begin();
  const int entries = inputs[mapped].shape(axes[mapped]);
  Arrays flat;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    mx::array in = axes[i] < 0 ? mx::expand_dims(inputs[i], 0, stream) : mx::moveaxis(inputs[i], axes[i], 0, stream);
    mx::Shape shape = in.shape();
    shape[0] = entries;
    flat.push_back(mx::flatten(mx::broadcast_to(in, shape, stream), 0, 1, stream));
  }
  Arrays outputs = apply(flat);
  for (mx::array& out : outputs) {
    out = mx::unflatten(out, 0, {entries, -1}, stream);
  }
  std::vector<int> first(outputs.size(), 0);
  return {std::move(outputs), std::move(first)};
}

}  // namespace mlx_cuda
