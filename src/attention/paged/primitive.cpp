#include "attention/paged/primitive.h"

#include "attention/paged/params.h"
#include "runtime/device_code.h"
#include "runtime/fused.h"
#include "runtime/memory.h"
#include "runtime/mlx_internals.h"
#include "runtime/node.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

namespace mlx_cuda {

namespace {

// The owner of pages that an update has written: the memory, and the stream that writes to it. Kernels of that stream hold the
// memory by an array::Data of their own, so that the reference count of the pages' Data counts only other owners.
struct PagesMemory {
  std::shared_ptr<mx::array::Data> memory;
  mx::Stream stream;

  void operator()(mx::allocator::Buffer) const {}  // the memory goes with the last that holds it
};

// Null for memory that is not of this kind.
const PagesMemory* pages_memory(const mx::array& in) {
  return deleter_of(in).target<PagesMemory>();
}

void set_memory(mx::array& out, const mx::array& like, PagesMemory memory) {
  out.set_data({like.buffer(), std::move(memory)}, like.data_size(), like.strides(), like.flags(), like.offset());
}

// Whether only earlier kernels of this stream can see writes to these pages.
bool writable(const mx::array& pages, const mx::Stream& stream) {
  const PagesMemory* held = pages_memory(pages);
  if (!held) {
    return pages.is_donatable();
  }
  return held->stream == stream && uses(pages) == 1 && pages.data_shared_ptr().use_count() == 1;
}

// Adds the kernel that writes rows to pages.
void write(
    mx::array& pages,
    const mx::array& given,
    const mx::array& table_in,
    const mx::array& lengths_in,
    CommandEncoder& encoder,
    const mx::Stream& stream) {
  const bool wide = given.shape(3) * given.itemsize() % 16 == 0;  // and so are rows of pages
  const mx::array rows = wide ? with_readable_rows(given, encoder, stream) : with_adjacent_elements(given, encoder, stream);
  const mx::array table = with_adjacent_elements(table_in, encoder, stream);
  const mx::array lengths = with_adjacent_elements(lengths_in, encoder, stream);

  PagedUpdateParams params{};
  KernelNode node(encoder);
  node.reads(pages);
  params.pages = node.writes(pages);
  params.rows = node.reads(rows);
  params.table = node.reads<int>(table);
  params.lengths = node.reads<int>(lengths);
  std::copy_n(pages.strides().begin(), 3, params.page_strides);
  std::copy_n(rows.strides().begin(), 3, params.row_strides);
  params.table_stride = table.strides(0);
  params.item_bytes = static_cast<int>(rows.itemsize());
  params.row_bytes = rows.shape(3) * params.item_bytes;
  params.batch = rows.shape(0);
  params.heads = rows.shape(1);
  params.count = rows.shape(2);
  params.page_count = pages.shape(0);
  params.page_size = pages.shape(2);
  params.table_pages = table.shape(1);

  static KernelModule kernels("paged");
  const std::int64_t lanes = std::int64_t{params.batch} * params.heads * params.count * 8;
  node.launch(kernels.function("paged_update"), dim3(static_cast<unsigned>(ceil_div(lanes, 256))), 256, 0, params);
}

// Adds the kernel that adds sums of rows; how many factors it takes.
std::uint64_t add_row_sums(
    mx::array& sums,
    const mx::array& given,
    std::uint64_t seed,
    std::uint64_t first,
    CommandEncoder& encoder,
    const mx::Stream& stream) {
  const mx::array rows = with_readable_rows(given, encoder, stream);
  RowSumsParams params{};
  KernelNode node(encoder);
  node.reads(sums);
  params.sums = static_cast<unsigned long long*>(node.writes(sums));
  params.rows = node.reads(rows);
  std::copy_n(rows.strides().begin(), 3, params.row_strides);
  params.seed = seed;
  params.first = first;
  params.item_bytes = static_cast<int>(rows.itemsize());
  params.row_bytes = rows.shape(3) * params.item_bytes;
  params.batch = rows.shape(0);
  params.heads = rows.shape(1);
  params.count = rows.shape(2);
  static KernelModule kernels("paged");
  const auto blocks = ceil_div(std::int64_t{params.batch} * params.count, RowSumsParams::kWarps);
  node.launch(kernels.function("row_sums"), dim3(static_cast<unsigned>(blocks)), RowSumsParams::kWarps * 32, 0, params);
  return static_cast<std::uint64_t>(params.heads) * params.row_bytes;
}

// Either keys or values: the inputs of a primitive with two outputs are held by both, so neither could be written in place.
class PagedCacheUpdate final : public Fused {
 public:
  using Fused::Fused;

  DEFINE_NAME(PagedCacheUpdate)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays&, const std::vector<int>&) override {
    throw std::invalid_argument("[paged_cache_update] vmap is not supported.");
  }

 protected:
  bool is_composable() const override {
    return false;
  }

  // The inputs that have gradients.
  Arrays compose(const Arrays&) const override {
    throw std::invalid_argument("[paged_cache_update] Gradients are not supported.");
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array& pages = inputs[0];
    mx::array& out = outputs[0];
    // A view may share elements with itself only if it is broadcast; then there is less memory than elements.
    const bool in_place = writable(pages, stream()) && pages.data_size() >= pages.size() && rows_readable(pages);
    const mx::array memory = in_place ? pages : contiguous_copy(pages, encoder, stream());
    if (pages_memory(memory)) {
      out.copy_shared_buffer(memory);
    } else {
      set_memory(out, memory, {memory.data_shared_ptr(), stream()});
    }
    write(out, inputs[1], inputs[2], inputs[3], encoder, stream());
  }
};

}  // namespace

void write_to_pages(
    const Arrays& pages, const Arrays& rows, const mx::array& table, const mx::array& lengths, const mx::Stream& stream) {
  Arrays given{table, lengths};
  given.insert(given.end(), rows.begin(), rows.end());
  mx::eval(given);
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  for (std::size_t i = 0; i < pages.size(); ++i) {
    mx::array out = pages[i];
    write(out, rows[i], table, lengths, encoder, stream);
  }
  encoder.commit();
  encoder.synchronize();  // the owner of the rows may free them now
}

mx::array row_sums(const Arrays& rows, std::uint64_t seed, const mx::Stream& stream) {
  mx::array sums = mx::zeros({rows.at(0).shape(0), rows[0].shape(2)}, mx::uint64, stream);
  mx::eval(joined(rows, sums));
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  std::uint64_t first = 0;
  for (const mx::array& each : rows) {
    first += add_row_sums(sums, each, seed, first, encoder, stream);
  }
  encoder.commit();
  encoder.synchronize();
  return sums;
}

bool updated_on(const mx::array& pages, const mx::Stream& stream) {
  const PagesMemory* held = pages_memory(pages);
  return held && held->stream == stream;
}

void hold_apart(const mx::array& pages) {
  mx::array same(pages.shape(), pages.dtype(), nullptr, {});
  set_memory(same, pages, *pages_memory(pages));
  replace_input(pages, std::move(same));
}

Arrays paged_cache_update(
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& keys,
    const mx::array& values,
    const mx::array& table,
    const mx::array& lengths,
    const mx::Stream& stream) {
  auto update = [&](const mx::array& pages, const mx::array& rows) {
    return result_of<PagedCacheUpdate>({pages, rows, table, lengths}, pages.dtype(), stream);
  };
  return {update(k_pages, keys), update(v_pages, values)};
}

}  // namespace mlx_cuda
