#include "decoding/capture/step.h"

#include "all_sum/all_sum.h"
#include "decoding/append/append.h"
#include "decoding/graph/capture_error.h"
#include "decoding/graph/plan.h"
#include "decoding/graph/step_primitive.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/mlx_internals.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <cstdint>

namespace mlx_cuda {

namespace {

KernelModule kernels("step");

}  // namespace

// An array whose value is there while its step is captured.
class Placed final : public StepPrimitive {
 public:
  Placed(const mx::Stream& stream, std::weak_ptr<Step> step, mx::array value)
      : StepPrimitive(stream), step_(std::move(step)), value_(std::move(value)) {}

  const char* name() const override {
    return kStepInput;
  }

  void eval_gpu(const Arrays&, Arrays& outputs) override {
    const auto step = step_.lock();
    if (!step || !step->capturing_) {
      throw CaptureError("[decode_step] The model reads a token or its position on the CPU.");
    }
    outputs[0].copy_shared_buffer(value_);
  }

 private:
  const std::weak_ptr<Step> step_;
  const mx::array value_;
};

// The launch of a captured step.
class Replay final : public StepPrimitive {
 public:
  Replay(const mx::Stream& stream, std::shared_ptr<Step> step, std::vector<Place> places)
      : StepPrimitive(stream), step_(std::move(step)), places_(std::move(places)) {}

  DEFINE_NAME(DecodeStep)

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    step_->launch(inputs[0], places_, outputs[0], stream());
  }

 private:
  const std::shared_ptr<Step> step_;
  const std::vector<Place> places_;
};

Step::Step(mx::Shape tokens, mx::Dtype dtype, int places, std::optional<Pages> pages, const mx::Stream& stream)
    : stream_(stream),
      tokens_(mx::zeros(tokens, dtype, stream)),
      places_(mx::zeros({places, place_field(kPlaceFields, tokens[0])}, mx::int32, stream)),
      sequences_(mx::zeros({places, 2, tokens[0]}, mx::int32, stream)),
      pages_(pages),
      count_(places) {
  if (places > BeginParams::kMostPlaces) {
    throw std::invalid_argument("[decode_step] The caches are at too many different positions.");
  }
  mx::eval(Arrays{tokens_, places_, sequences_});
  hold(tokens_);
  hold(places_);
  if (pages_) {
    table_ = mx::zeros({places, tokens[0] * pages_->columns}, mx::int32, stream);
    next_table_ = mx::zeros({places, tokens[0], pages_->columns}, mx::int32, stream);
    mx::eval(Arrays{*table_, *next_table_});
    hold(*table_);
  }
}

Step::~Step() {
  destroy();
}

void Step::destroy() {
  // MLX's thread, which frees memory of finished work, has no current context.
  CUcontext popped = nullptr;
  const bool pushed = context_ && cuCtxPushCurrent(context_) == CUDA_SUCCESS;
  if (executable_) {
    cuGraphExecDestroy(std::exchange(executable_, nullptr));
  }
  if (pushed) {
    cuCtxPopCurrent(&popped);
  }
}

void Step::hold(const mx::array& array) {
  memory_.insert(array.data_shared_ptr());
}

mx::array Step::placed(const mx::array& value) {
  mx::array out(value.shape(), value.dtype(), std::make_shared<Placed>(stream_, weak_from_this(), value), {});
  made_.add(out);
  return out;
}

mx::array Step::tokens() {
  return placed(tokens_);
}

namespace {

mx::array part(const mx::array& places, int place, int first, mx::Shape shape) {
  mx::array out(std::move(shape), places.dtype(), nullptr, {});
  const mx::Strides strides = out.ndim() == 2 ? mx::Strides{out.shape(1), 1} : mx::Strides(out.ndim(), 1);
  const bool is_row = out.ndim() < 2 || out.shape(0) == 1 || out.shape(1) == 1;
  out.copy_shared_buffer(places, strides, {true, true, is_row}, out.size(), place * places.shape(1) + first);
  out.set_status(mx::array::Status::available);
  return out;
}

}  // namespace

mx::array Step::offset(int place) {
  return placed(part(places_, place, 0, {}));
}

mx::array Step::row(int place) {
  return placed(part(places_, place, 1, {}));
}

mx::array Step::offsets(int place) {
  return placed(part(places_, place, place_field(kOffsets, tokens_.shape(0)), {tokens_.shape(0)}));
}

mx::array Step::lengths(int place) {
  return placed(part(places_, place, place_field(kLengths, tokens_.shape(0)), {tokens_.shape(0)}));
}

mx::array Step::starts(int place) {
  return placed(part(places_, place, place_field(kStarts, tokens_.shape(0)), {tokens_.shape(0)}));
}

mx::array Step::where(int place) const {
  return part(places_, place, place_field(kPages, tokens_.shape(0)), {2, tokens_.shape(0)});
}

mx::array Step::table(int place) {
  if (!table_) {
    throw std::invalid_argument("[decode_step] The captured step has no pages.");
  }
  return placed(part(*table_, place, 0, {tokens_.shape(0), pages_->columns}));
}

mx::array Step::content(const mx::array& memory) {
  return placed(memory);
}

mx::array Step::finish(const mx::array& result, const Arrays& from, const Arrays& to) {
  written_ = to;
  return cache_replace(result, from, to, stream_);
}

void Step::set_sequences(const mx::array& sequences, const MaybeArray& table) {
  const auto fits = [](const mx::array& given, const mx::array& own) {
    return given.shape() == own.shape() && given.dtype() == mx::int32;
  };
  if (!fits(sequences, sequences_) || table.has_value() != next_table_.has_value() || (table && !fits(*table, *next_table_))) {
    throw std::invalid_argument("[decode_step] Sequences do not fit the captured step.");
  }
  const auto settled = [&](const mx::array& given) {  // which does not wait if the host made it
    mx::array out = given.is_available() && given.flags().row_contiguous ? given : mx::contiguous(given, false, stream_);
    out.eval();
    return out;
  };
  sequences_ = settled(sequences);  // steps that are under way hold the one before
  if (table) {
    next_table_ = settled(*table);
  }
}

Arrays Step::append(const mx::array& keys, const mx::array& values, const mx::array& k_cache, const mx::array& v_cache, int place) {
  return cache_append({keys, values, k_cache, v_cache, where(place)}, stream_);
}

Arrays Step::append_quantized(
    const mx::array& keys, const mx::array& values, const Arrays& memory, int group, int bits, int place) {
  Arrays inputs{keys, values};
  inputs.insert(inputs.end(), memory.begin(), memory.end());
  inputs.push_back(where(place));
  return quantized_cache_append(inputs, {group, bits}, stream_);
}

void Step::leave_alone(bool alone) const {
  mlx_cuda::leave_alone(peers_, alone, stream_);
}

void Step::begin(const mx::array& tokens, const std::vector<Place>& places, CUstream queue) const {
  BeginParams params{};
  params.tokens = mx::gpu_ptr<void>(tokens);
  params.tokens_to = const_cast<void*>(mx::gpu_ptr<void>(tokens_));
  params.places_to = const_cast<int*>(mx::gpu_ptr<int>(places_));
  params.sequences = mx::gpu_ptr<int>(sequences_);
  params.token_bytes = static_cast<int>(tokens.itemsize());
  params.token_distance = tokens.strides(0) * params.token_bytes;
  params.batch = tokens_.shape(0);
  params.given = tokens.shape(0);
  params.count = count_;
  if (pages_) {
    params.table = mx::gpu_ptr<int>(*next_table_);
    params.table_to = const_cast<int*>(mx::gpu_ptr<int>(*table_));
    params.columns = pages_->columns;
    params.page_size = pages_->size;
  }
  std::copy_n(places.begin(), count_, params.places);
  void* arguments[] = {&params};
  MLX_CUDA_CHECK(
      cuLaunchKernel(kernels.function("step_begin"), 1, 1, 1, BeginParams::kThreads, 1, 1, 0, queue, arguments, nullptr));
}

void Step::launch(const mx::array& tokens, const std::vector<Place>& places, mx::array& out, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  allocate(out, stream);
  encoder.commit();  // what comes before it in the stream
  const CUstream queue = encoder.stream();
  begin(tokens, places, queue);
  MLX_CUDA_CHECK(cuGraphLaunch(executable_, queue));
  launched_ = true;
  MLX_CUDA_CHECK(cuMemcpyDtoDAsync(
      reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(out)), reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(result_[0])),
      out.nbytes(), queue));
  encoder.add_temporary(tokens);
  encoder.add_temporary(sequences_);
  if (next_table_) {
    encoder.add_temporary(*next_table_);
  }
  encoder.add_temporary(out);
  encoder.add_completed_handler([self = shared_from_this()] {});
}

mx::array Step::replay(const mx::array& tokens, const std::vector<Place>& places, const mx::Stream& stream) {
  const bool fits = tokens.shape() == tokens_.shape() || (pages_ && tokens.ndim() == 2 && tokens.shape(1) == 1 &&
                                                          tokens.size() > 0 && tokens.shape(0) < tokens_.shape(0));
  if (result_.empty() || !fits || tokens.dtype() != tokens_.dtype() || static_cast<int>(places.size()) != count_) {
    throw CaptureError("[decode_step] The call does not fit the captured step.");
  }
  // The tokens' inputs belong to the caller: if their evaluation fails, MLX drops kernels of arrays that it marks as evaluated,
  // so nothing may use them, and the error is raised to the caller.
  if (tokens.status() == mx::array::Status::unscheduled) {
    mx::async_eval({tokens});
  }
  Arrays inputs{tokens};
  inputs.insert(inputs.end(), last_.begin(), last_.end());  // after it, on whichever stream that was
  mx::array out(result_[0].shape(), result_[0].dtype(), std::make_shared<Replay>(stream, shared_from_this(), places), inputs);
  launched_ = false;
  try {
    mx::async_eval({out});
  } catch (const std::exception& error) {
    if (launched_) {  // the caches have moved on
      throw;
    }
    throw CaptureError(error.what());
  }
  last_.assign(1, out);
  for (mx::array& cache : shared_) {
    cache.attach_event(out.event());
    cache.set_status(mx::array::Status::evaluated);
  }
  return out;
}

namespace {

// The stride between the heads of [batch, heads, rows, dim] in elements, if each head's rows are adjacent; otherwise 0.
std::int64_t distance(const mx::array& in) {
  const std::int64_t own = std::int64_t{in.shape(2)} * in.shape(3);
  if (in.flags().row_contiguous) {
    return own;
  }
  const bool even = in.strides(3) == 1 && in.strides(2) == in.shape(3) && in.strides(1) >= own &&
                    (in.shape(0) == 1 || in.strides(0) == in.shape(1) * in.strides(1));
  return even ? in.strides(1) : 0;
}

// Copies so many rows of so many bytes, each so many bytes after the one before.
void copy_rows(
    void* to, std::size_t to_pitch, void* from, std::size_t from_pitch, std::size_t bytes, std::size_t count, CUstream queue) {
  const auto target = reinterpret_cast<CUdeviceptr>(to);
  const auto source = reinterpret_cast<CUdeviceptr>(from);
  const auto widest = static_cast<std::size_t>(device_attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH));  // 2 GiB
  if (count > 1 && std::max({to_pitch, from_pitch, bytes}) <= widest) {
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = source;
    copy.dstDevice = target;
    copy.WidthInBytes = bytes;
    copy.srcPitch = from_pitch;
    copy.dstPitch = to_pitch;
    copy.Height = count;
    MLX_CUDA_CHECK(cuMemcpy2DAsync(&copy, queue));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    MLX_CUDA_CHECK(cuMemcpyDtoDAsync(target + i * to_pitch, source + i * from_pitch, bytes, queue));
  }
}

// Writes zeros to so many rows.
void clear_rows(CUdeviceptr to, std::size_t pitch, std::size_t bytes, std::size_t count, CUstream queue) {
  if (pitch <= static_cast<std::size_t>(device_attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH))) {
    MLX_CUDA_CHECK(cuMemsetD2D8Async(to, pitch, 0, bytes, count, queue));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    MLX_CUDA_CHECK(cuMemsetD8Async(to + i * pitch, 0, bytes, queue));
  }
}

}  // namespace

Arrays Step::fill(Arrays content, const std::vector<std::optional<int>>& rows, const Arrays& caches) {
  mx::eval(content);  // the caller's, whose errors are MLX's own
  capturing([&] { copy_in(std::move(content), rows, caches); });
  return shared_;
}

void Step::copy_in(Arrays content, const std::vector<std::optional<int>>& rows, const Arrays& caches) {
  for (std::size_t i = 0; i < content.size(); ++i) {
    if (rows.at(i) ? distance(content[i]) == 0 : !content[i].flags().row_contiguous) {
      content[i] = mx::contiguous(content[i], false, stream_);
    }
  }
  mx::eval(content);
  if (!last_.empty()) {
    last_[0].wait();  // work of the memory's former owner
  }
  auto& encoder = mx::cu::get_command_encoder(stream_);
  encoder.device().make_current();
  encoder.synchronize();
  shared_.clear();
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const mx::array& from = content.at(i);
    const mx::array& cache = caches[i];
    void* source = mx::gpu_ptr<void>(from);
    void* target = mx::gpu_ptr<void>(cache);
    if (rows[i]) {
      const std::size_t row = cache.shape(3) * cache.itemsize();
      const std::size_t bytes = std::min({*rows[i], from.shape(2), cache.shape(2)}) * row;
      const std::size_t heads = static_cast<std::size_t>(cache.shape(0)) * cache.shape(1);
      copy_rows(target, cache.shape(2) * row, source, distance(from) * cache.itemsize(), bytes, heads, encoder.stream());
    } else {
      copy_rows(target, 0, source, 0, cache.nbytes(), 1, encoder.stream());
    }
    hold(cache);
    shared_.push_back(view(cache, cache.shape()));
    shared_.back().set_status(mx::array::Status::available);
  }
  encoder.synchronize();
}

void Step::clear(const std::vector<std::optional<int>>& rows) {
  capturing([&] {
    auto& encoder = mx::cu::get_command_encoder(stream_);
    encoder.device().make_current();
    if (!last_.empty()) {
      last_[0].wait();  // it may still append
    }
    for (std::size_t i = 0; i < shared_.size(); ++i) {
      const mx::array& cache = shared_[i];
      if (rows.at(i) && *rows[i] < cache.shape(2)) {
        const std::size_t row = cache.shape(3) * cache.itemsize();
        const auto first = reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(cache)) + *rows[i] * row;
        const std::size_t heads = static_cast<std::size_t>(cache.shape(0)) * cache.shape(1);
        clear_rows(first, cache.shape(2) * row, (cache.shape(2) - *rows[i]) * row, heads, encoder.stream());
      }
    }
    encoder.synchronize();
  });
}

bool Step::moved() const {
  return std::any_of(captured_at_.begin(), captured_at_.end(), [](const auto& each) { return each.first->data != each.second; });
}

// Whether each of the arrays that were given away has so many references, and no other array shares its memory.
bool Step::settled(long wanted) {
  constexpr long kHolders = 3;  // of the memory: `memory_`, the array that was given to `fill`, and the one that it gave
  auto untouched = [&] {
    return std::all_of(shared_.begin(), shared_.end(), [&](const mx::array& cache) {
      return uses(cache) == wanted && cache.data_shared_ptr().use_count() == kHolders;
    });
  };
  if (moved()) {
    return false;
  }
  if (untouched()) {
    return true;
  }
  mx::cu::get_command_encoder(stream_).synchronize();  // work that is under way holds memory for a while
  return untouched();
}

bool Step::owns(const std::vector<const mx::array*>& caches) {
  auto same = [](const mx::array* given, const mx::array& own) { return given->id() == own.id(); };
  return std::equal(caches.begin(), caches.end(), shared_.begin(), shared_.end(), same) && settled(2);
}

bool Step::free() {
  return settled(1);
}

}  // namespace mlx_cuda
