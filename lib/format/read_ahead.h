// Reads pieces of files while earlier ones are checked.
#pragma once
#include <algorithm>

#include "files/io_queue.h"
#include "format/blocks.h"

namespace frugal {

// A ring of pieces of memory. One is checked, and the others are read into. Each has a thread, so
// the disk has work also while some of these threads wait for a processor.
class ReadAhead {
 public:
  static constexpr size_t kPieceBytes = size_t{2} << 20;
  static constexpr uint64_t kBlocks = kPieceBytes / kFileBlock;
  static constexpr uint32_t kPieces = 8;

  Status open() {
    FRUGAL_TRY(memory_.open(kPieces * kPieceBytes));
    return queue_.open(kPieces - 1);
  }

  // For i below n: the request of piece i is request(i, memory), and look(i, memory, status) gets
  // what was read.
  template <class Request, class Look>
  void each(uint64_t n, Request request, Look look) {
    struct Ended {  // no thread uses the memory afterwards, also if look() throws
      ReadAhead& ahead;
      ~Ended() {
        for (IoBatch& batch : ahead.batches_) {
          ahead.queue_.cancel(&batch);
          (void)ahead.queue_.wait(&batch);
        }
      }
    } const ended{*this};
    for (uint64_t i = 0, begun = 0; i < n; ++i) {
      for (; begun < std::min(n, i + kPieces); ++begun) {
        IoBatch& batch = batches_[begun % kPieces];
        batch.requests.assign(1, request(begun, piece(begun)));
        queue_.submit(&batch);
      }
      const Status status = queue_.wait(&batches_[i % kPieces]);
      look(i, piece(i), status);
    }
  }

 private:
  char* piece(uint64_t i) const { return memory_.at() + i % kPieces * kPieceBytes; }

  PieceMemory memory_;
  IoBatch batches_[kPieces];
  IoQueue queue_;  // ends before the memory
};

}  // namespace frugal
