#include "matmul/grouped/primitive.h"
#include "matmul/quantized/dequantize_then_gemm.h"
#include "matmul/quantized/moe.h"
#include "matmul/quantized/params.h"
#include "matmul/quantized/quantized.h"
#include "matmul/quantized/sm90.h"
#include "matmul/quantized/weights.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

namespace {

constexpr int kTileRows = 32;  // matmul/quantized/quantized_skinny.cu
constexpr int kSlice = 256;
constexpr int kChunk = 32;
constexpr int kScaleBytes = 32 * 12 * 4;     // of a warp
constexpr int kResultBytes = (32 + 4) * 4;   // of a warp and row of x
constexpr int kLargeShared = 160 << 10;      // bytes of shared memory, from which on 16 warps have room
constexpr int kMostRowWarps = 8;             // each has a barrier, of which a block has 15 beside its own
constexpr int kThreads = 256;                // of a block of the plain kernels
constexpr int kPlainRows = 4;                // of x that it takes
constexpr int kPlainColumns = 256;           // of the result
constexpr int kPlainTransposedColumns = 32;  // likewise with w transposed
constexpr int kFewestPlain = 64;             // of inner, in one split
constexpr int kMostPlainSplits = 32;
constexpr int kGroupedMultiple = 8;  // of what products of groups are summed over
constexpr int kUpstreamTile = 64;    // MLX's kernels sum floats of 4 and 8 bits over multiples of this
constexpr int kTheirAlignment = 16;  // bytes

KernelModule& few_kernels() {
  static KernelModule module("quantized_skinny");
  return module;
}

KernelModule& plain_kernels() {
  static KernelModule module("quantized_plain");
  return module;
}

struct Problem {
  int rows;
  int columns;
  int inner;
  int products;
};

// How a kernel is launched.
struct Plan {
  KernelModule& module;
  std::string kernel = {};
  dim3 grid = {};
  int threads = 0;
  int shared = 0;  // bytes
};

class QuantizedFew final : public Weighted {
 public:
  QuantizedFew(
      const mx::Stream& stream,
      const QuantizedWeights& weights,
      bool lhs,
      bool rhs,
      bool transpose,
      std::shared_ptr<mx::Primitive> theirs)
      : Weighted(stream, weights), lhs_(lhs), rhs_(rhs), transpose_(transpose), theirs_(std::move(theirs)) {}

  const char* name() const override {
    return "QuantizedFew";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const QuantizedFew&>(other);
    return Weighted::is_equivalent(other) && lhs_ == that.lhs_ && rhs_ == that.rhs_ && transpose_ == that.transpose_ &&
           !theirs_ == !that.theirs_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::array& x = inputs[0];
    const QuantizedWeights in = weights(inputs, 1);
    mx::Shape shape = x.shape();
    if (rhs_) {
      shape = inputs.back().shape();
      shape.push_back(x.shape(-2));
      shape.push_back(0);
    }
    shape.back() = transpose_ ? in.w.shape(-2) : in.inner();
    return {shape};
  }

  // That of x is the same product, of its tangent.
  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents, const std::vector<int>& argnums) override {
    if (argnums != std::vector<int>{0}) {
      return Weighted::jvp(primals, tangents, argnums);
    }
    const auto [lhs, rhs] = indices(primals);
    return {quantized_few(tangents[0], weights(primals, 1), lhs, rhs, transpose_, theirs_ != nullptr, queue())};
  }

  // That of x is one more product, with w the other way round.
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override {
    std::vector<mx::array> gradients;
    for (const int argnum : argnums) {
      const auto own = argnum == 0 ? x_gradient(primals, cotangents[0]) : std::nullopt;
      gradients.push_back(own ? *own : Weighted::vjp(primals, cotangents, {argnum}, outputs)[0]);
    }
    return gradients;
  }

  // A batch of x only is more rows.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    const QuantizedWeights in = weights(inputs, 1);
    if (rhs_ || std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; })) {
      return Fused::vmap(inputs, axes);
    }
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, queue());
    return {{quantized_few(x, in, std::nullopt, std::nullopt, transpose_, false, queue())}, {0}};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const QuantizedWeights in = weights(inputs, 1);
    const auto [lhs, rhs] = indices(inputs);
    if (!in.biases && in.inner() % kUpstreamTile != 0) {  // summed over here, or in the gradient of x
      const mx::array values = values_of(in, inputs[0].dtype(), queue());
      const mx::array w = transpose_ ? mx::swapaxes(values, -1, -2, queue()) : values;
      return {rhs ? mx::gather_mm(inputs[0], w, lhs, rhs, false, queue()) : mx::matmul(inputs[0], w, queue())};
    }
    if (rhs) {
      return {mx::gather_qmm(
          inputs[0], in.w, in.scales, in.biases, lhs, rhs, transpose_, in.group_size, in.bits, in.mode, std::nullopt, false,
          queue())};
    }
    const bool vector = inputs[0].ndim() == 1;  // MLX's kernels take none
    const mx::array x = vector ? mx::expand_dims(inputs[0], 0, queue()) : inputs[0];
    const mx::array out = mx::quantized_matmul(x, in.w, in.scales, in.biases, transpose_, in.group_size, in.bits, in.mode, queue());
    return {vector ? mx::squeeze(out, 0, queue()) : out};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override;

 private:
  std::pair<std::optional<mx::array>, std::optional<mx::array>> indices(const std::vector<mx::array>& inputs) const {
    std::size_t next = 1 + count();
    auto take = [&](bool there) { return there ? std::optional(inputs[next++]) : std::nullopt; };
    auto lhs = take(lhs_);
    auto rhs = take(rhs_);
    return {std::move(lhs), std::move(rhs)};
  }

  // None where MLX computes it: of pairs that the grouped kernels do not take.
  std::optional<mx::array> x_gradient(const std::vector<mx::array>& primals, const mx::array& cotangent) const {
    const mx::array& x = primals[0];
    const QuantizedWeights in = weights(primals, 1);
    const auto [lhs, rhs] = indices(primals);
    if (!rhs) {
      return transpose_ ? quantized_many(cotangent, in, false, queue())
                        : quantized_few(cotangent, in, std::nullopt, std::nullopt, true, false, queue());
    }
    if (!transpose_ || x.dtype() == mx::float32 || cotangent.shape(-1) % kGroupedMultiple != 0) {
      return std::nullopt;
    }
    // Rows in the order of their matrices, and back.
    const int rows = x.shape(-2);
    const mx::array order = mx::argsort(*rhs, queue());
    const mx::array first = expert_offsets(mx::take(*rhs, order, queue()), in.w.shape(0), queue());
    const mx::array offsets = mx::multiply(first, mx::array(rows), queue());
    const mx::array sorted = mx::flatten(mx::take(cotangent, order, 0, queue()), 0, 1, queue());
    const mx::array products = grouped_quantized(sorted, in, offsets, false, queue());
    const mx::array each = mx::take(mx::unflatten(products, 0, {-1, rows}, queue()), mx::argsort(order, queue()), 0, queue());
    if (!lhs) {
      return mx::reshape(each, x.shape(), queue());
    }
    const mx::array updates = mx::expand_dims(mx::astype(each, mx::float32, queue()), 1, queue());
    const mx::array sums = mx::scatter_add(mx::zeros(x.shape(), mx::float32, queue()), *lhs, updates, 0, queue());
    return mx::astype(sums, x.dtype(), queue());
  }

  bool lhs_;
  bool rhs_;
  bool transpose_;
  std::shared_ptr<mx::Primitive> theirs_;  // MLX's own, which is called where it takes the layouts
};

// Whether MLX's kernel for one row reads them: it wants rows one after another, in all of its operands.
bool theirs_takes(const std::vector<mx::array>& inputs) {
  return std::all_of(inputs.begin(), inputs.end(), [](const mx::array& in) {
    return in.flags().row_contiguous && in.strides(-1) == 1 && in.strides(-2) == in.shape(-1) && is_aligned(in, 0, kTheirAlignment);
  });
}

bool uses_tensor_cores(const Problem& problem, mx::Dtype dtype, bool transpose) {
  return dtype != mx::float32 && transpose && problem.inner % kChunk == 0 && compute_capability() >= 80;
}

// Bytes on which rows of w have to lie for the few kernel.
int chunk_alignment(int bits) {
  return bits % 4 == 0 ? 16 : bits % 2 == 0 ? 8 : 4;
}

// Measured on an H200 at 14336 x 4096, 4096 x 14336, 4096 x 4096, 1024 x 2048 and 8 to 64 of 32 or 128 experts; the few warps where
// shared memory is small are reasoned.
Plan plan_few(FewParams& params, const Problem& problem, const Readable& in, mx::Dtype dtype) {
  const int tiles = problem.rows <= 8 ? 1 : problem.rows <= 16 ? 2 : 4;  // of 8 rows of x, in a block
  const int rows = std::min(problem.rows, tiles * 8);
  const int padded = tiles == 1 ? rows : divide_up(rows, 8) * 8;
  const int row_blocks = divide_up(problem.rows, tiles * 8);
  const int slices = divide_up(problem.inner, kSlice);
  const int column_tiles = divide_up(problem.columns, kTileRows);
  const int processors = multiprocessors();
  const int limit = shared_memory_limit();

  // Two blocks of 8 warps share a multiprocessor while x is small, else there is one of 16.
  const int warps = tiles == 1 || limit < kLargeShared ? 8 : 16;
  const int warp_bytes = kScaleBytes + rows * kResultBytes;
  const int x_bytes = std::min(tiles == 1 ? 64 << 10 : 128 << 10, limit - warps * warp_bytes);
  const int most_slices = std::max(x_bytes / (2 * padded * kSlice), 1);
  int splits = divide_up(slices, most_slices);

  const std::int64_t work = static_cast<std::int64_t>(column_tiles) * row_blocks * problem.products;
  const bool many = work * splits >= 2 * processors;
  // Fewer, longer blocks: 14336 x 4096 of 4 bit in 16.0 us alone (four warps of a tile 14.7), but two calls at once in 26.2 (27.8)
  // and many in 10.2 each (11.1). 8 bit gains nothing.
  const bool longer = tiles == 1 && in.weights.bits == 4 && problem.products == 1;
  int inner_warps = tiles == 4 ? 2 : many ? (longer ? 2 : 4) : warps;
  if (tiles == 4) {  // x is shared by many rows of w, which few columns leave some multiprocessors without
    const std::int64_t blocks =
        static_cast<std::int64_t>(divide_up(column_tiles, warps / inner_warps)) * row_blocks * problem.products;
    const auto wanted = static_cast<int>(processors / blocks);
    splits = std::max(splits, std::min(wanted, slices / inner_warps));
  }
  const int range = divide_up(slices, splits);
  const int turns = divide_up(range, std::min(inner_warps, range));
  params.inner_warps = divide_up(range, turns);
  params.row_warps = many || tiles == 4 ? std::clamp(warps / params.inner_warps, 1, kMostRowWarps) : 1;
  params.range = range * kSlice;
  params.splits = divide_up(slices, range);
  // The scales of a slice, where they lie on as many bytes as they are.
  const mx::array& scales = in.weights.scales;
  const auto scale_size = static_cast<int>(scales.itemsize());
  const int scale_bytes = kSlice / in.weights.group_size * scale_size;
  const auto aligned = [&](const mx::array& array) { return array.offset() % scale_bytes == 0; };
  params.wide = params.groups * scale_size % scale_bytes == 0 && in.scale_distance % scale_bytes == 0 && aligned(scales) &&
                (!in.weights.biases || aligned(*in.weights.biases));

  Plan plan{few_kernels()};
  plan.kernel = "quantized_few_" + format_name(in.weights) + "_" + type_name(dtype) + "_" + std::to_string(tiles);
  plan.threads = params.row_warps * params.inner_warps * 32;
  plan.shared = params.range * 2 * padded + params.row_warps * params.inner_warps * warp_bytes;
  // As many blocks as run at once: each keeps its x for all the tiles that it takes.
  const int resident = std::max(std::min(limit / plan.shared, 512 / plan.threads), 1);
  const std::int64_t others = static_cast<std::int64_t>(params.splits) * row_blocks * problem.products;
  const auto most = std::max<std::int64_t>(processors * resident / others, 1);
  const auto blocks = std::min<std::int64_t>(divide_up(column_tiles, params.row_warps), most);
  plan.grid = dim3(static_cast<unsigned>(blocks), params.splits * row_blocks, problem.products);
  return plan;
}

Plan plan_plain(FewParams& params, const Problem& problem, const Readable& in, mx::Dtype dtype, bool transpose) {
  const bool single = transpose && problem.rows == 1 && dtype == mx::float32;
  const int row_blocks = divide_up(problem.rows, single ? 1 : kPlainRows);
  const int columns = divide_up(problem.columns, transpose ? kPlainTransposedColumns : kPlainColumns);
  params.splits = 1;
  if (!transpose) {  // a block has many columns, so there may be few blocks
    const std::int64_t blocks = static_cast<std::int64_t>(columns) * row_blocks * problem.products;
    const auto wanted = static_cast<int>(divide_up(8 * multiprocessors(), blocks));
    params.splits = std::clamp(wanted, 1, std::clamp(problem.inner / kFewestPlain, 1, kMostPlainSplits));
  }
  params.range = divide_up(problem.inner, params.splits);
  params.splits = divide_up(problem.inner, params.range);
  Plan plan{plain_kernels()};
  plan.kernel = std::string(transpose ? "quantized_transposed_" : "quantized_plain_") + format_name(in.weights) + "_" +
                type_name(dtype) + (single ? "_1" : "_4");
  plan.threads = kThreads;
  plan.grid = dim3(columns, params.splits * row_blocks, problem.products);
  return plan;
}

void QuantizedFew::encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) {
  if (theirs_ && theirs_takes(inputs)) {
    theirs_->eval_gpu(inputs, outputs);
    return;
  }
  mx::array& out = outputs[0];
  const auto given = weights(inputs, 1);
  auto [lhs, rhs] = indices(inputs);
  Problem problem{
      .rows = rhs ? inputs[0].shape(-2) : static_cast<int>(inputs[0].size() / inputs[0].shape(-1)),
      .columns = out.shape(-1),
      .inner = inputs[0].shape(-1),
      .products = 1,
  };
  problem.products = static_cast<int>(out.size() / problem.rows / problem.columns);
  allocate(out, stream());

  const bool tensor_cores = uses_tensor_cores(problem, inputs[0].dtype(), transpose_);
  const bool hopper = tensor_cores && quantized_sm90_takes(problem.rows, given.bits);
  mx::array x = inputs[0];
  if (!row_distance(x) || !is_aligned(x, *row_distance(x), 16)) {
    x = contiguous_copy(x, encoder, stream());
  }
  const Readable in = readable(
      given, false,
      hopper            ? quantized_sm90_alignment(given.bits)
      : tensor_cores    ? chunk_alignment(given.bits)
      : given.bits == 8 ? 8
                        : 4,
      encoder, stream());
  for (auto* index : {&lhs, &rhs}) {
    if (*index && !(*index)->flags().row_contiguous) {
      *index = contiguous_copy(**index, encoder, stream());
    }
  }
  if (hopper) {
    encode_quantized_sm90(x, problem.rows, in, lhs, rhs, out, encoder, stream());
    return;
  }

  if (tensor_cores && rhs && problem.rows == 1 && quantized_pairs_takes(in, problem.products)) {
    encode_quantized_pairs(x, in, lhs, *rhs, out, encoder);
    return;
  }

  FewParams params{};
  params.x_row = *row_distance(x);
  params.x_distance = params.x_row * problem.rows;
  params.row_bytes = in.row_bytes;
  params.matrices = static_cast<int>(x.size() / problem.rows / problem.inner);
  params.experts = static_cast<int>(in.weights.w.size() / in.weights.w.shape(-1) / in.weights.w.shape(-2));
  params.rows = problem.rows;
  params.columns = problem.columns;
  params.inner = problem.inner;
  params.groups = in.weights.scales.shape(-1);
  set_weights(params, in);
  const Plan plan =
      tensor_cores ? plan_few(params, problem, in, x.dtype()) : plan_plain(params, problem, in, x.dtype(), transpose_);
  if (params.splits > 1) {
    params.partial = static_cast<float*>(workspace(out.size() * params.splits * sizeof(float), encoder, stream()));
  }

  encoder.set_input_array(x);
  name_inputs(in.weights, encoder);
  for (const auto* index : {&lhs, &rhs}) {
    if (*index) {
      encoder.set_input_array(**index);
    }
  }
  encoder.set_output_array(out);
  take_lane(encoder);
  params.x = mx::gpu_ptr<void>(x);
  params.out = mx::gpu_ptr<void>(out);
  params.x_index = lhs ? mx::gpu_ptr<unsigned>(*lhs) : nullptr;
  params.w_index = rhs ? mx::gpu_ptr<unsigned>(*rhs) : nullptr;
  encoder.add_kernel_node_ex(
      plan.module.function(plan.kernel), plan.grid, dim3(plan.threads), dim3(), static_cast<unsigned>(plan.shared), params);
  if (params.splits > 1) {
    encoder.set_input_array(out);
    encoder.set_output_array(out);
    const float* partial = params.partial;
    void* to = params.out;
    auto size = static_cast<long long>(out.size());
    int splits = params.splits;
    encoder.add_kernel_node_ex(
        plain_kernels().function("quantized_merge_" + type_name(out.dtype())), dim3(divide_up(size, kThreads)), dim3(kThreads),
        dim3(), 0, partial, to, size, splits);
  }
}

}  // namespace

mx::array quantized_few(
    const mx::array& x,
    const QuantizedWeights& weights,
    const std::optional<mx::array>& lhs_indices,
    const std::optional<mx::array>& rhs_indices,
    bool transpose,
    bool small,
    const mx::Stream& stream) {
  if (!can_copy(x)) {  // there are no indices, and the leading dimensions are rows
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    const mx::array rows = mx::flatten(x, 0, -2, stream);
    return mx::unflatten(quantized_few(rows, weights, lhs_indices, rhs_indices, transpose, small, stream), 0, leading, stream);
  }
  std::vector<mx::array> inputs{x};
  append_inputs(inputs, weights);
  for (const auto* index : {&lhs_indices, &rhs_indices}) {
    if (*index) {
      inputs.push_back(**index);
    }
  }
  std::shared_ptr<mx::Primitive> theirs;
  if (small && x.ndim() > 1) {  // MLX's kernels take no vector
    const auto& [w, scales, biases, group_size, bits, mode] = weights;
    theirs = mx::quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode, stream).primitive_ptr();
  }
  auto primitive = std::make_shared<QuantizedFew>(
      stream, weights, lhs_indices.has_value(), rhs_indices.has_value(), transpose, std::move(theirs));
  mx::Shape shape = primitive->output_shapes(inputs)[0];
  return mx::array(std::move(shape), x.dtype(), std::move(primitive), std::move(inputs));
}

}  // namespace mlx_cuda
