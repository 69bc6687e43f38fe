// One decode step of a model as one executable CUDA graph: captured once, then launched for each token.
//
// The model's own code builds the graph of a step from arrays of this class: tokens, positions of the caches, and caches to which
// a kernel appends. Capturing evaluates that graph node by node on MLX's encoder, so that its kernels, and mlx-cuda's, become
// nodes of one CUDA graph, which is kept together with all memory that it uses.
#pragma once

#include "all_sum/peers.h"
#include "decoding/append/params.h"
#include "decoding/capture/lifetimes.h"
#include "runtime/arrays.h"

#include <cuda.h>
#include <mlx/stream.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mlx::core::cu {
struct CudaBuffer;
}

namespace mlx_cuda {

class Plan;
struct EncodedGraph;

class Step : public std::enable_shared_from_this<Step> {
 public:
  // For tokens of this shape [batch, 1] and dtype, and caches at so many different positions. `pages`: all are paged with so many
  // rows per page, and a sequence has at most so many pages.
  struct Pages {
    int size;
    int columns;
  };
  Step(mx::Shape tokens, mx::Dtype dtype, int places, std::optional<Pages> pages, const mx::Stream& stream);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step();

  // Arrays that have a value only where a captured step runs: evaluating them elsewhere is an error.
  mx::array tokens();            // [batch, 1]
  mx::array offset(int place);   // int32 []
  mx::array row(int place);      // int32 []
  mx::array offsets(int place);  // int32 [batch], of each sequence
  mx::array lengths(int place);  // int32 [batch]
  mx::array starts(int place);   // int32 [batch]: rows before are not there
  mx::array table(int place);    // int32 [batch, columns]: the pages of each sequence
  // What an array holds that `finish` may write to.
  mx::array content(const mx::array& memory);

  // The caches, [batch or pages, heads, capacity, dim], with a token's keys and values at their position. They are written in
  // place.
  Arrays append(const mx::array& keys, const mx::array& values, const mx::array& k_cache, const mx::array& v_cache, int place);

  // The same for a quantized KV cache (append.h).
  Arrays append_quantized(const mx::array& keys, const mx::array& values, const Arrays& memory, int group, int bits, int place);

  // The result, after which the first arrays have been copied to the others, where the next step finds them.
  mx::array finish(const mx::array& result, const Arrays& from, const Arrays& to);

  // Each sequence's additions to the offset, and to the start, of its position, from now on: int32 [places, 2, batch], zeros at
  // first; and, if paged, its pages, int32 [places, batch, columns].
  void set_sequences(const mx::array& sequences, const MaybeArray& table);

  // Captures the computation of this array, and runs it once for these tokens and positions; other processes do not notice. A
  // CaptureError if it cannot be captured (capture_error.h).
  void record(const mx::array& result, const mx::array& tokens, const std::vector<Place>& places);

  // Launches the step and returns a result for others. `stream` may differ from that of the capture, unless the step has
  // all-reduces. If paged, there may be fewer tokens than the batch has; the other rows of the result are garbage.
  mx::array replay(const mx::array& tokens, const std::vector<Place>& places, const mx::Stream& stream);

  // Copies so many first rows, or everything, into caches (row-contiguous, [batch, heads, rows, dim] of those with rows), and
  // returns arrays of that memory for its new owner. The caller keeps `caches`.
  Arrays fill(Arrays content, const std::vector<std::optional<int>>& rows, const Arrays& caches);
  // Zeros all but so many first rows of the arrays that `fill` returned: the memory may hold data of other requests, and its
  // owner may read or save all of it.
  void clear(const std::vector<std::optional<int>>& rows);
  // Whether these are the arrays that `fill` returned, in the same order, and nothing else refers to their memory.
  bool owns(const std::vector<const mx::array*>& caches);
  // Whether they are no longer in use.
  bool free();
  // Whether an array of the captured graph, other than its result, is still in use.
  bool has_arrays_left() const {
    return made_.any_left();
  }
  // Whether MLX has put a weight or a cache elsewhere since it was captured, as it does where the host reads one.
  bool moved() const;

  // Whether it has all-reduces, whose memory belongs to the stream of the capture; and makes these local.
  bool has_sums() const {
    return !peers_.empty();
  }
  void leave_alone(bool alone) const;

  std::size_t nodes() const {
    return nodes_;
  }
  // How many of which primitives were captured.
  const std::map<std::string, int>& primitives() const {
    return primitives_;
  }

 private:
  // Where appends go to: pages and rows, int32 [2, batch].
  mx::array where(int place) const;

  friend class Placed;
  friend class Replay;

  void destroy();
  void capture(Plan& plan, const mx::array& tokens, const std::vector<Place>& places);
  void encode(const Plan& plan);
  void make_executable(EncodedGraph encoded);
  void copy_in(Arrays content, const std::vector<std::optional<int>>& rows, const Arrays& caches);
  mx::array placed(const mx::array& value);
  void begin(const mx::array& tokens, const std::vector<Place>& places, CUstream queue) const;
  bool settled(long uses);
  void launch(const mx::array& tokens, const std::vector<Place>& places, mx::array& out, const mx::Stream& stream);
  void hold(const mx::array& array);

  const mx::Stream stream_;
  mx::array tokens_;  // where kernels read them
  mx::array places_;
  mx::array sequences_;
  std::optional<Pages> pages_;
  MaybeArray table_{};       // where kernels read it
  MaybeArray next_table_{};  // copied there at each launch
  int count_;
  bool capturing_ = false;
  Arrays written_{};  // by what `finish` gave
  Arrays shared_{};
  Arrays result_{};  // one, once it is captured
  Arrays last_{};    // the last launch: readers of a cache wait for it
  std::unordered_set<std::shared_ptr<mx::array::Data>> memory_{};
  std::vector<std::pair<const mx::cu::CudaBuffer*, const void*>> captured_at_{};  // what others hold too, and may have moved
  Lifetimes made_{};                                                              // of the arrays of the captured graph
  bool launched_ = false;  // the last replay's graph, whatever failed after it
  std::set<std::shared_ptr<const Peers>> peers_{};
  std::map<std::string, int> primitives_{};
  std::size_t nodes_ = 0;
  CUcontext context_ = nullptr;
  CUgraphExec executable_ = nullptr;
};

}  // namespace mlx_cuda
