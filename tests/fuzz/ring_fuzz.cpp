// A hostile peer's region of a channel, and when it changes, from bytes: the calls of the other
// side never crash, never hang, never touch anything outside. Some bytes choose calls, the others
// are written where the peer may write.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../process/proc.h"
#include "base/os.h"
#include "fuzz/bytes.h"
#include "process/channel.h"

namespace {

using frugal::Channel;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kRing = 4096, kStaging = size_t{2} << 20;
  Bytes in{data, size};
  const uint64_t start = in.Number(8);
  const bool attack_controller = in.Number(1) % 2 == 0;
  std::unique_ptr<Channel> controller, trainer;
  std::shared_ptr<frugal::StagingMemory> staging;
  Check(frugal::StagingMemory::make(kStaging, nullptr, &staging) == FRUGAL_OK);
  Check(Channel::create(kRing, staging, &controller, start) == FRUGAL_OK);
  const int fd = dup(attack_controller ? controller->up_fd() : controller->down_fd());
  if (!attack_controller)
    Check(Channel::attach(dup(controller->up_fd()), dup(controller->down_fd()),
                          dup(controller->staging_fd()), &trainer) == FRUGAL_OK);
  // What the controller alone writes is sealed, so its own mapping is used.
  frugal::Mapping region;
  if (attack_controller) {
    Check(frugal::os_map_shared(fd, true, &region) == FRUGAL_OK);
  } else {
    region.base = writable_mapping_of(fd);
    Check(region.base != nullptr && close(fd) == 0);
  }
  Channel& side = attack_controller ? *controller : *trainer;
  // Nothing may be changed after the bytes that are read.
  std::vector<char> out(3 * kRing);
  uint64_t received = 0;
  while (in.left > 0) {
    const uint64_t what = in.Number(1);
    switch (what % 16) {
      case 0: {  // a word of the first page, where the ends are
        const uint64_t value = in.Number(8);
        std::memcpy(region.base + in.Number(2) % 512 * 8, &value, 8);
        break;
      }
      case 1:
      case 2:
      case 8:
      case 9: {  // a count goes on, mostly by what it may
        const uint64_t at = in.Number(1) % 4 * 256 + (attack_controller ? 0 : 128);
        const uint64_t add = what < 16 ? in.Number(2) % (2 * kRing) : in.Number(1) % 8 * 64;
        uint64_t value;
        std::memcpy(&value, region.base + at, 8);
        value += add;
        std::memcpy(region.base + at, &value, 8);
        break;
      }
      case 3: {  // contents of the rings
        const uint64_t at = in.Number(3) % (frugal::kHugePage - 256);
        const size_t n = std::min<size_t>(in.Number(1), in.left);
        if (n > 0) std::memcpy(region.base + at, in.at, n);
        in.at += n;
        in.left -= n;
        break;
      }
      case 4: {
        frugal::Header h{};
        const frugal::Piece piece{out.data(), in.Number(2) % out.size()};
        side.send(h, &piece, 1, 0);
        break;
      }
      case 5:
      case 10:
      case 11: {
        frugal::Header h{};
        if (side.receive(&h, 0) == FRUGAL_OK) {
          Check(side.payload_left() == h.payload);
          ++received;
        }
        break;
      }
      case 6:
      case 12: {
        const size_t n = in.Number(2) % (out.size() - 1);
        out[n] = 'g';
        side.read(out.data(), n, 0);
        Check(out[n] == 'g');
        break;
      }
      default: {
        const uint64_t a = in.Number(4), b = in.Number(4);
        if (attack_controller) {
          side.release(a);
          if (const char* p = side.staging_at(a, b)) {
            Check(a <= kStaging && b <= kStaging - a);
            if (b > 0) out[0] = static_cast<char>(p[0] + p[b - 1]);
          }
        } else {
          uint64_t offset;
          side.next_release(&offset);
        }
      }
    }
    // What it found broken stays so.
    if (side.is_cut()) {
      frugal::Header h{};
      Check(side.receive(&h, 0) == FRUGAL_ERR_PEER_LOST);
      Check(side.send(h, nullptr, 0, 0) == FRUGAL_ERR_PEER_LOST);
      break;
    }
  }
  if (attack_controller) frugal::os_release(&region);
  return received > 0 ? 0 : -1;  // -1: of no use for the corpus
}
