// Parts of a trainer process's staging memory that are lent to the engine.
#pragma once
#include <atomic>
#include <memory>
#include <utility>

#include "base/buffer.h"
#include "process/channel.h"

namespace frugal {

// Staging memory of a trainer process whose buffers the engine has yet to read. Lives until the
// request loop and all these buffers are gone.
class Staging final : public Buffer::Owner, public HeapObject {
 public:
  explicit Staging(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  // The buffer's data is null if the range is not within the staging memory, or if more would be
  // lent than there is: no range may be lent twice.
  Buffer lend(uint64_t offset, uint64_t bytes);
  void give_back(char* data, size_t bytes) noexcept override;
  void drop_reference() noexcept {
    if (users_.fetch_sub(1) == 1) delete this;
  }

 private:
  ~Staging() = default;
  const std::shared_ptr<Channel> channel_;
  std::atomic<uint32_t> users_{1};
  std::atomic<uint64_t> lent_{0};  // bytes
};

}  // namespace frugal
