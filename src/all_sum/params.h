// How a sum over GPUs is called, and what lies in the memory that they reach of each other.
#pragma once

namespace mlx_cuda {

// out = x of each process, summed up, + added. Each thread takes eight bytes of x, or each block pieces of up to 64 KiB in turns.
//
// Letters: a thread writes its eight bytes to every other GPU, each half with the number of the sum, so that who finds that number
// has the half. Pieces: a block writes a piece, then the number that says that it is there. What belongs to one number and to the
// next lies in one of two boxes, in turns.
struct AllSumParams {
  static constexpr int kMost = 8;  // processes

  static constexpr int kThreads = 256;
  static constexpr int kBytes = 8;            // of x, of a thread
  static constexpr int kMostLetters = 32768;  // of x, times the other GPUs
  static constexpr int kMostBlocks = kMostLetters / kThreads;
  static constexpr int kBlocksPerMultiprocessor = 6;
  static constexpr int kLetter = 16;  // bytes

  static constexpr int kPieceThreads = 512;
  static constexpr int kPieceLoads = 8;  // of 16 bytes, of a thread, at most
  static constexpr int kPiece = kPieceThreads * kPieceLoads * 16;
  static constexpr int kPieceBlocks = 128;
  static constexpr int kPieceBlocksPerMultiprocessor = 2;

  // The memory of each process: whether its sums are its own alone, as while steps are recorded, and the number of the last sum of
  // each block, neither of which anybody else reads; then the letters [2, count, kMostLetters]. For pieces, which are of two
  // processes only: numbers, then those that the other one has written [kPieceBlocks], then its pieces [2, kPieceBlocks].
  static constexpr int kAlone = 16;
  static constexpr long long letters() {
    return kAlone + kMostBlocks * 4;
  }
  static constexpr long long numbers(int count) {
    return letters() + 2LL * count * kMostLetters * kLetter;
  }
  static constexpr long long pieces() {
    return numbers(2) + 2LL * kPieceBlocks * 4;
  }
  static constexpr long long bytes(int count) {
    return count > 2 ? numbers(count) : pieces() + 2LL * kPieceBlocks * kPiece;
  }

  const void* x;
  const void* added;  // or null
  void* out;
  void* memory[kMost];  // of each process
  int rank;
  int count;
  long long size;  // of x, in bytes: a multiple of eight, or 16 where it goes in pieces
  int loads;       // of a thread, for a piece
};

}  // namespace mlx_cuda
