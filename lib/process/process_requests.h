// The request loop of a process: its calls outside steps.
#pragma once
#include <memory>

#include "process/request_loop.h"

namespace frugal {

class ProcessRequestLoop final : public RequestLoop {
 public:
  // `observes`: the process changes nothing.
  ProcessRequestLoop(std::shared_ptr<Engine> engine, std::shared_ptr<Channel> channel,
                     bool observes, RequestLoopOwner* owner = nullptr, uint64_t peer = 0)
      : RequestLoop(std::move(engine), std::move(channel), owner, peer), observes_(observes) {}
  ~ProcessRequestLoop();

 private:
  Status handle(const Header& request) override;
  Status rows_call(Call call, const Header& request);

  const bool observes_;
  uint64_t trace_ = 0;  // the trace that its process has begun; 0: none
  String text_;         // of a reply
};

}  // namespace frugal
