// Descriptors that a controller has sent.
#pragma once
#include <memory>

#include "base/heap.h"
#include "base/os.h"
#include "process/channel.h"

namespace frugal {

// Closes those that were not taken.
struct Descriptors {
  explicit Descriptors(Vector<int>& of) : all(of) {}
  Descriptors(const Descriptors&) = delete;
  ~Descriptors();
  int take(size_t i);
  // Maps what the i-th descriptor, and those after it, refer to. They are taken.
  Status map(size_t i, Mapping* out);
  Status channel(size_t i, bool with_staging, std::unique_ptr<Channel>* out);
  Vector<int>& all;
};

}  // namespace frugal
