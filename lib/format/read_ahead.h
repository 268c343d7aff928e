// Reads pieces of files while earlier ones are looked at.
#pragma once
#include <algorithm>

#include "files/io_queue.h"
#include "format/blocks.h"

namespace frugal {

// A ring of pieces of memory. One is looked at, and the others are read into. Each has a thread, so
// the disk has work also while some of these threads wait for a processor.
class ReadAhead {
 public:
  static constexpr size_t kPieceBytes = size_t{2} << 20;
  static constexpr uint64_t kBlocks = kPieceBytes / kFileBlock;
  static constexpr uint32_t kPieces = 8;

  Status open() { return queue_.open(kPieces - 1); }

  // For i below n: the request of piece i is request(i, memory), and look(i, memory, status) gets
  // what was read.
  template <class Request, class Look>
  void each(uint64_t n, Request request, Look look) {
    struct Ended {  // no thread uses the memory afterwards, also if look() throws
      ReadAhead& ahead;
      ~Ended() {
        for (Piece& p : ahead.pieces_) {
          ahead.queue_.cancel(&p.batch);
          (void)ahead.queue_.wait(&p.batch);
        }
      }
    } const ended{*this};
    for (uint64_t i = 0, begun = 0; i < n; ++i) {
      for (; begun < std::min(n, i + kPieces); ++begun) {
        Piece& p = pieces_[begun % kPieces];
        p.batch.requests.assign(1, request(begun, p.memory.at));
        queue_.submit(&p.batch);
      }
      Piece& p = pieces_[i % kPieces];
      const Status status = queue_.wait(&p.batch);
      look(i, p.memory.at, status);
    }
  }

 private:
  struct Piece {
    IoBatch batch;
    Blocks memory{kPieceBytes};
  };
  Piece pieces_[kPieces];
  IoQueue queue_;  // ends before the memory
};

}  // namespace frugal
