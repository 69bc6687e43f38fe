#include "primitives/paged.h"

#include "kernels/paged.h"
#include "primitives/fused.h"
#include "runtime/kernels.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

// Defined in the source that the build generates from kernels/paged.cu.
extern const std::uint64_t mlx_cuda_fatbin_paged[];

namespace mlx_cuda {

namespace {

class PagedCacheUpdate final : public Fused {
 public:
  using Fused::Fused;

  const char* name() const override {
    return "PagedCacheUpdate";
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[1].shape()};
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&, const std::vector<int>&) override {
    throw std::invalid_argument("[paged_cache_update] vmap is not supported.");
  }

 protected:
  // What derivatives would be taken of.
  std::vector<mx::array> compose(const std::vector<mx::array>&) const override {
    throw std::invalid_argument("[paged_cache_update] Derivatives are not supported.");
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    for (int side : {0, 1}) {
      const mx::array& pages = inputs[side];
      // A view may share elements with itself only if it is broadcast; then there is less memory than elements.
      const bool writable = pages.is_donatable() && pages.data_size() >= pages.size() && rows_readable(pages);
      outputs[side].copy_shared_buffer(writable ? pages : contiguous_copy(pages, encoder, stream()));
    }
    std::vector<mx::array> rows;
    for (const mx::array& in : {inputs[2], inputs[3]}) {
      rows.push_back(rows_readable(in) ? in : contiguous_copy(in, encoder, stream()));
    }
    const bool adjacent = inputs[4].strides(1) == 1 || inputs[4].shape(1) == 1;
    const mx::array table = adjacent ? inputs[4] : contiguous_copy(inputs[4], encoder, stream());
    const mx::array lengths =
        inputs[5].strides(0) == 1 || inputs[5].shape(0) == 1 ? inputs[5] : contiguous_copy(inputs[5], encoder, stream());

    for (const mx::array& in : {rows[0], rows[1], table, lengths, outputs[0], outputs[1]}) {
      encoder.set_input_array(in);
    }
    PagedUpdateParams params{};
    for (int side : {0, 1}) {
      encoder.set_output_array(outputs[side]);
      PagedRows& to = params.sides[side];
      to.pages = mx::gpu_ptr<void>(outputs[side]);
      to.rows = mx::gpu_ptr<void>(rows[side]);
      std::copy_n(outputs[side].strides().begin(), 3, to.page_strides);
      std::copy_n(rows[side].strides().begin(), 3, to.row_strides);
      to.bytes = rows[side].shape(3) * static_cast<int>(rows[side].itemsize());
    }
    params.table = mx::gpu_ptr<int>(table);
    params.lengths = mx::gpu_ptr<int>(lengths);
    params.table_stride = table.strides(0);
    params.item_bytes = static_cast<int>(rows[0].itemsize());
    params.batch = rows[0].shape(0);
    params.heads = rows[0].shape(1);
    params.count = rows[0].shape(2);
    params.pages = inputs[0].shape(0);
    params.page_size = inputs[0].shape(2);
    params.table_pages = table.shape(1);

    static KernelModule kernels(mlx_cuda_fatbin_paged);
    const std::int64_t lanes = std::int64_t{params.batch} * params.heads * params.count * 8;
    encoder.add_kernel_node_ex(
        kernels.function("paged_update"), dim3(static_cast<unsigned>((lanes + 255) / 256), 2), dim3(256), dim3(), 0, params);
  }
};

}  // namespace

std::vector<mx::array> paged_cache_update(
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& keys,
    const mx::array& values,
    const mx::array& table,
    const mx::array& lengths,
    const mx::Stream& stream) {
  return mx::array::make_arrays(
      {k_pages.shape(), v_pages.shape()}, {k_pages.dtype(), v_pages.dtype()}, std::make_shared<PagedCacheUpdate>(stream),
      {k_pages, v_pages, keys, values, table, lengths});
}

}  // namespace mlx_cuda
