// What a block of the kernels of flash.cu does (FlashAttention-2, arXiv:2307.08691): it takes a tile of rows of one head and goes
// over the keys in tiles. Scores and weights stay in registers, the sums of the softmax are kept up as it goes.
//
// Where head_dim is too long for one warp to hold 16 rows of the output, several warps ("parts") share the rows: each makes the
// scores of its part of the keys, they exchange maxima and weights through shared memory, and each sums up its part of the columns.
#pragma once

#include "attention/flash/bias.cuh"
#include "attention/flash/parts.cuh"

namespace mlx_cuda {

// D, DV: head_dim of the keys and of the values at most. Keys: of one tile. RowTiles: tiles of 16 rows that a warp holds. Stages:
// buffers of K and of V. Held: Q stays in registers.
template <typename T, int D, int DV, int Keys, int Warps, int RowTiles, int Parts, int Stages, bool Held, bool General>
__device__ inline void flash(const FlashParams& p) {
  constexpr bool kFloat = sizeof(T) == 4;
  constexpr int kThreads = Warps * 32;
  constexpr int kWarpRows = RowTiles * 16;
  constexpr int kRows = Warps / Parts * kWarpRows;
  constexpr int kPitch = D * static_cast<int>(sizeof(T)) + 16;  // of Q and K
  constexpr int kValuePitch = DV * static_cast<int>(sizeof(T)) + 16;
  constexpr int kWeightPitch = Keys * 2 + 16;
  constexpr int kTiles = Keys / Parts / 8;  // of 8 keys, whose scores a warp makes
  constexpr int kColumns = DV / Parts;      // of the output, that a warp sums up
  constexpr int kSteps = D * static_cast<int>(sizeof(T)) / 32;
  static_assert(kTiles % 2 == 0 && Keys % 32 == 0 && !(kFloat && Parts > 1));

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int part = warp % Parts;
  const int group = warp / Parts;

  // Of a few heads at a time, those tiles first that may see the most keys.
  const int row_tiles = (p.q_length + kRows - 1) / kRows;
  const int bundle = static_cast<int>(blockIdx.x / (static_cast<unsigned>(p.section) * row_tiles));
  const int in_bundle = static_cast<int>(blockIdx.x % (static_cast<unsigned>(p.section) * row_tiles));
  const int bundle_size = min(p.section, p.batch * p.heads - bundle * p.section);
  const int row_tile = row_tiles - 1 - in_bundle / bundle_size;
  const int head = (bundle * p.section + in_bundle % bundle_size) % p.heads;
  const int batch = (bundle * p.section + in_bundle % bundle_size) / p.heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int row0 = row_tile * kRows;

  int q_begin = 0;
  int k_begin = 0;
  int q_length = p.q_length;
  Sight sight{0, p.kv_length, p.window_left, p.window_right};
  if (p.cu_q) {
    q_begin = p.cu_q[batch];
    q_length = p.cu_q[batch + 1] - q_begin;
    k_begin = p.cu_k[batch];
    sight.end = p.cu_k[batch + 1] - k_begin;
  }
  if (p.starts) {
    sight.begin = max(p.starts[batch], 0);
  }
  if (p.ends) {
    sight.end = min(p.ends[batch], sight.end);
  }
  if (row0 >= q_length) {
    return;
  }
  const int shift = sight.end - q_length;  // from the number of a query to its place among the keys
  const int row_end = min(row0 + kRows, q_length);
  const int warp_row0 = row0 + group * kWarpRows;
  const int warp_last = min(warp_row0 + kWarpRows, q_length) - 1;
  const bool idle = warp_last < warp_row0;
  // Keys that some row of this warp sees, and keys that all of them see.
  const int seen_from = sight.from(warp_row0 + shift);
  const int seen_to = idle ? seen_from : sight.to(warp_last + shift);
  const int whole_from = sight.from(warp_last + shift);
  const int whole_to = sight.to(warp_row0 + shift);

  Walk walk;
  const int first = sight.from(row0 + shift);
  walk.last = (max(sight.to(row_end - 1 + shift), 0) + Keys - 1) / Keys;
  walk.list = nullptr;
  walk.count = 0;
  if (General && p.mask.tiles) {
    walk.list = p.mask.tiles + batch * p.mask.tile_strides[0] + head * p.mask.tile_strides[1] + row_tile * p.mask.tile_strides[2];
    walk.count =
        p.mask.tile_counts[batch * p.mask.count_strides[0] + head * p.mask.count_strides[1] + row_tile * p.mask.count_strides[2]];
  }
  walk.start(first / Keys);

  extern __shared__ uint4 memory[];
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  const unsigned shared_k = shared + kRows * kPitch;
  const unsigned shared_v = shared_k + Stages * Keys * kPitch;
  [[maybe_unused]] const unsigned shared_weights = shared_v + Stages * Keys * kValuePitch;  // [row][key]
  [[maybe_unused]] float* shared_rows =  // [part][row]: maxima, and in the end sums
      reinterpret_cast<float*>(
          reinterpret_cast<char*>(memory) + kRows * kPitch + Stages * Keys * (kPitch + kValuePitch) +
          (Parts > 1 ? kRows * kWeightPitch : 0));

  constexpr long long kSize = sizeof(T);
  const char* k_head =
      static_cast<const char*>(p.k) + (batch * p.k_strides.batch + kv_head * p.k_strides.head + k_begin * p.k_strides.row) * kSize;
  const char* v_head =
      static_cast<const char*>(p.v) + (batch * p.v_strides.batch + kv_head * p.v_strides.head + k_begin * p.v_strides.row) * kSize;
  auto load_keys = [&](int tile, int stage) {
    load_rows<Keys, D* static_cast<int>(sizeof(T)), kThreads>(
        shared_k + stage * Keys * kPitch, k_head, p.k_strides.row * kSize, p.head_dim * static_cast<int>(kSize), tile * Keys,
        sight.begin, sight.end);
  };
  auto load_values = [&](int tile, int stage) {
    load_rows<Keys, DV* static_cast<int>(sizeof(T)), kThreads>(
        shared_v + stage * Keys * kValuePitch, v_head, p.v_strides.row * kSize, p.v_head_dim * static_cast<int>(kSize), tile * Keys,
        sight.begin, sight.end);
  };

  float acc[RowTiles][kColumns / 8][4];
  float peak[RowTiles][2];  // of rows g and g + 8, the same in all lanes of a quad
  float sum[RowTiles][2];   // of this lane's keys
#pragma unroll
  for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      acc[t][j][0] = acc[t][j][1] = acc[t][j][2] = acc[t][j][3] = 0;
    }
    peak[t][0] = peak[t][1] = -kInfinity;
    sum[t][0] = sum[t][1] = 0;
  }

  // What a lane gives to ldmatrix: rows 8 (m % 2) or 8 (m / 2) of matrix m.
  const unsigned q_address = shared + (group * kWarpRows + lane % 16) * kPitch + lane / 16 * 16;
  const unsigned k_address = shared_k + (part * kTiles * 8 + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
  const unsigned v_address =
      kFloat ? shared_v + 2 * c * kValuePitch + g * 4
             : shared_v + lane % 16 * kValuePitch + lane / 16 * 16 + part * kColumns * static_cast<int>(sizeof(T));
  [[maybe_unused]] const unsigned weight_address = shared_weights + (group * kWarpRows + lane % 16) * kWeightPitch + lane / 16 * 16;
  [[maybe_unused]] uint4 q_held[Held ? RowTiles : 1][Held ? kSteps : 1];

  if (!walk.done()) {
    const char* q_head =
        static_cast<const char*>(p.q) + (batch * p.q_strides.batch + head * p.q_strides.head + q_begin * p.q_strides.row) * kSize;
    load_rows<kRows, D* static_cast<int>(sizeof(T)), kThreads>(
        shared, q_head, p.q_strides.row * kSize, p.head_dim * static_cast<int>(kSize), row0, 0, q_length);
    commit_copies();
    load_keys(walk.tile, 0);
    if constexpr (Stages > 1) {
      load_values(walk.tile, 0);
    }
    commit_copies();
    if constexpr (Held || kFloat) {
      wait_copies<1>();
      __syncthreads();
      if constexpr (kFloat) {
        for (int i = threadIdx.x; i < kRows * (D / 4); i += kThreads) {
          round_to_tf32(reinterpret_cast<float*>(memory) + i / (D / 4) * (kPitch / 4) + i % (D / 4) * 4);
        }
      }
      if constexpr (Held) {
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            q_held[t][s] = load_matrices(q_address + t * 16 * kPitch + s * 32);
          }
        }
      }
    }
  }

  const float scale = p.scale * kLog2e;
  int stage = 0;
  while (!walk.done()) {
    const int tile = walk.tile;
    const int key0 = tile * Keys;
    const bool active = key0 < seen_to && key0 + Keys > seen_from;
    const bool whole = walk.unmasked && key0 >= whole_from && key0 + Keys <= whole_to;
    walk.advance();
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and nobody reads the one before any more
    if constexpr (Stages > 1) {
      if (!walk.done()) {
        load_keys(walk.tile, stage ^ 1);
        load_values(walk.tile, stage ^ 1);
      }
    } else {
      load_values(tile, 0);
    }
    commit_copies();

    float scores[RowTiles][kTiles][4];
    if (active) {
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          scores[t][n][0] = scores[t][n][1] = scores[t][n][2] = scores[t][n][3] = 0;
        }
      }
      const unsigned keys = k_address + (Stages > 1 ? stage * Keys * kPitch : 0);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint4 a[RowTiles];
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
          if constexpr (Held) {
            a[t] = q_held[t][s];
          } else {
            a[t] = load_matrices(q_address + t * 16 * kPitch + s * 32);
          }
        }
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          uint4 b = load_matrices(keys + n * 8 * kPitch + s * 32);
          if constexpr (kFloat) {
            b = make_uint4(
                to_tf32(__uint_as_float(b.x)), to_tf32(__uint_as_float(b.y)), to_tf32(__uint_as_float(b.z)),
                to_tf32(__uint_as_float(b.w)));
          }
#pragma unroll
          for (int t = 0; t < RowTiles; ++t) {
            mma(scores[t][n], a[t], b.x, b.y, T{});
            mma(scores[t][n + 1], a[t], b.z, b.w, T{});
          }
        }
      }
    }
    if constexpr (Stages == 1) {
      wait_copies<0>();
      __syncthreads();  // the values have arrived, and nobody reads these keys any more
      if (!walk.done()) {
        load_keys(walk.tile, 0);
      }
      commit_copies();
    }
    if (active) {
      float unit = scale;
      if (General && p.softcap > 0) {
        const float inner = 2.0f * kLog2e * p.scale / p.softcap;
        const float outer = p.softcap * kLog2e;
        unit = 1;
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scores[t][n][i] = capped(scores[t][n][i], inner, outer);
            }
          }
        }
      }
      if (!whole) {
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = min(warp_row0 + t * 16 + half * 8 + g, q_length - 1);
            const unsigned* bits = p.mask.bits ? p.mask.bits + batch * p.mask.bit_strides[0] + head * p.mask.bit_strides[1] +
                                                     row * p.mask.bit_strides[2]
                                               : nullptr;
            const T* bias = p.mask.values ? static_cast<const T*>(p.mask.values) + batch * p.mask.strides[0] +
                                                head * p.mask.strides[1] + row * p.mask.strides[2]
                                          : nullptr;
            restrict_row<T, General>(
                p, scores[t], half, unit, sight, row + shift, key0 + part * kTiles * 8, bits, bias,
                General ? shift_of(p, batch, head, row) : 0.0f);
          }
        }
        unit = General && p.mask.values ? 1.0f : unit;
      }
      // The maxima of the rows so far, in units of log2.
      float top[RowTiles][2];
      bool higher = false;
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = fmaxf(scores[t][0][half * 2], scores[t][0][half * 2 + 1]);
#pragma unroll
          for (int n = 1; n < kTiles; ++n) {
            most = fmaxf(most, fmaxf(scores[t][n][half * 2], scores[t][n][half * 2 + 1]));
          }
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
          if constexpr (Parts > 1) {
            if (c == 0) {
              shared_rows[part * kRows + group * kWarpRows + t * 16 + half * 8 + g] = most;
            }
          }
          top[t][half] = most;
        }
      }
      if constexpr (Parts > 1) {
        meet(group, Parts * 32);
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < Parts; ++i) {
              top[t][half] = fmaxf(top[t][half], shared_rows[i * kRows + group * kWarpRows + t * 16 + half * 8 + g]);
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          top[t][half] *= unit;
          higher = higher || top[t][half] > peak[t][half] + kSlack;
        }
      }
      if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float most = fmaxf(top[t][half], peak[t][half]);
            const float shrink = most == -kInfinity ? 0.0f : exp2_approx(peak[t][half] - most);
            peak[t][half] = most;
            sum[t][half] *= shrink;
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
              acc[t][j][half * 2] *= shrink;
              acc[t][j][half * 2 + 1] *= shrink;
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float zero = peak[t][half] == -kInfinity ? 0.0f : peak[t][half];
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& score = scores[t][n][half * 2 + e];
              score = exp2_approx(fmaf(score, unit, -zero));
              sum[t][half] += score;
            }
          }
        }
      }

      const unsigned values = v_address + (Stages > 1 ? stage * Keys * kValuePitch : 0);
      if constexpr (kFloat) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          // Which key is which k index is free: keys 2c and 2c + 1 are indices c and c + 4.
          uint4 a[RowTiles];
#pragma unroll
          for (int t = 0; t < RowTiles; ++t) {
            a[t] =
                make_uint4(to_tf32(scores[t][n][0]), to_tf32(scores[t][n][2]), to_tf32(scores[t][n][1]), to_tf32(scores[t][n][3]));
          }
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const unsigned b0 = to_tf32(load_shared(values + n * 8 * kValuePitch + j * 32));
            const unsigned b1 = to_tf32(load_shared(values + (n * 8 + 1) * kValuePitch + j * 32));
#pragma unroll
            for (int t = 0; t < RowTiles; ++t) {
              mma(acc[t][j], a[t], b0, b1, T{});
            }
          }
        }
      } else {
        uint4 weights[RowTiles][kTiles / 2];
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
          for (int n = 0; n < kTiles; n += 2) {
            weights[t][n / 2] = make_uint4(
                pack(scores[t][n][0], scores[t][n][1], T{}), pack(scores[t][n][2], scores[t][n][3], T{}),
                pack(scores[t][n + 1][0], scores[t][n + 1][1], T{}), pack(scores[t][n + 1][2], scores[t][n + 1][3], T{}));
          }
        }
        if constexpr (Parts > 1) {
#pragma unroll
          for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              const int at = (group * kWarpRows + t * 16 + g) * kWeightPitch + ((part * kTiles + n) * 8 + 2 * c) * 2;
              const uint4& both = weights[t][n / 2];
              asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_weights + at), "r"(n % 2 ? both.z : both.x) : "memory");
              asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_weights + at + 8 * kWeightPitch), "r"(n % 2 ? both.w : both.y)
                           : "memory");
            }
          }
          meet(group, Parts * 32);
        }
#pragma unroll
        for (int s = 0; s < Keys / 16; ++s) {
          uint4 a[RowTiles];
#pragma unroll
          for (int t = 0; t < RowTiles; ++t) {
            if constexpr (Parts > 1) {
              a[t] = load_matrices(weight_address + t * 16 * kWeightPitch + s * 32);
            } else {
              a[t] = weights[t][s];
            }
          }
#pragma unroll
          for (int j = 0; j < kColumns / 8; j += 2) {
            const uint4 b = load_matrices_transposed(values + s * 16 * kValuePitch + j * 16);
#pragma unroll
            for (int t = 0; t < RowTiles; ++t) {
              mma(acc[t][j], a[t], b.x, b.y, T{});
              mma(acc[t][j + 1], a[t], b.z, b.w, T{});
            }
          }
        }
      }
    }
    if constexpr (Stages > 1) {
      stage ^= 1;
    }
  }

  // The sums of the rows, and what they scale.
#pragma unroll
  for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 1);
      sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 2);
      if constexpr (Parts > 1) {
        if (t == 0 && half == 0) {
          meet(group, Parts * 32);  // the maxima have been read
        }
        if (c == 0) {
          shared_rows[part * kRows + group * kWarpRows + t * 16 + half * 8 + g] = sum[t][half];
        }
      }
    }
  }
  if constexpr (Parts > 1) {
    meet(group, Parts * 32);
  }
#pragma unroll
  for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row0 + t * 16 + half * 8 + g;
      float total = sum[t][half];
      if constexpr (Parts > 1) {
        total = 0;
#pragma unroll
        for (int i = 0; i < Parts; ++i) {
          total += shared_rows[i * kRows + group * kWarpRows + t * 16 + half * 8 + g];
        }
      }
      float weight = 1;
      float base = peak[t][half];
      if (p.sinks) {
        const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[head]);
        base = fmaxf(base, sink);
        weight = peak[t][half] == -kInfinity ? 0.0f : exp2f(peak[t][half] - base);
        total = total * weight + (base == -kInfinity ? 0.0f : exp2f(sink - base));
      }
      const float factor = total > 0 ? weight / total : 0.0f;
      const bool there = row < q_length;
      if (p.lse && there && c == 0 && part == 0) {
        p.lse[batch * p.lse_strides[0] + head * p.lse_strides[1] + q_begin + row] = total > 0    ? (base + log2f(total)) * kLn2
                                                                                    : total == 0 ? -kInfinity
                                                                                                 : total;
      }
      T* to = static_cast<T*>(p.out) + batch * p.out_strides.batch + head * p.out_strides.head +
              (q_begin + row) * p.out_strides.row + part * kColumns;
      const int columns = p.v_head_dim - part * kColumns;
      if constexpr (kFloat) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          if (there && j * 8 < columns) {
            *reinterpret_cast<float2*>(to + j * 8 + 2 * c) =
                make_float2(acc[t][j][half * 2] * factor, acc[t][j][half * 2 + 1] * factor);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = pack(acc[t][j + i][half * 2] * factor, acc[t][j + i][half * 2 + 1] * factor, T{});
          }
          const uint4 block = gather_quad(words);
          if (there && (j + c) * 8 < columns) {
            *reinterpret_cast<uint4*>(to + (j + c) * 8) = block;
          }
        }
      }
    }
  }
  wait_copies<0>();
}

}  // namespace mlx_cuda
