#include "process/descriptors.h"

#include <unistd.h>

namespace frugal {

Descriptors::~Descriptors() {
  for (int fd : all)
    if (fd >= 0) ::close(fd);
  all.clear();
}

int Descriptors::take(size_t i) {
  const int fd = all[i];
  all[i] = -1;
  return fd;
}

Status Descriptors::map(size_t i, Mapping* out) {
  if (i >= all.size()) return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  FRUGAL_TRY(os_map_shared(all[i], false, out));
  take(i);
  return FRUGAL_OK;
}

Status Descriptors::channel(size_t i, bool with_staging, std::unique_ptr<Channel>* out) {
  if (i + 1 >= all.size())
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  const bool staging = i + 2 < all.size() && with_staging;
  FRUGAL_TRY(Channel::attach(all[i], all[i + 1], staging ? all[i + 2] : -1, out));
  take(i);
  take(i + 1);
  if (staging) take(i + 2);
  return FRUGAL_OK;
}

}  // namespace frugal
