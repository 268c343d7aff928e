// Bytes of a peer to the controller's socket. The service must live on: whatever comes, it ends the
// connection when the peer has ended its side, and goes on to serve others.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fuzz/control_service.h"

namespace {

// Bytes of the message that begins here, or all that there are. *asks: it is one that gets a reply,
// so that the next may name what the reply gives.
size_t message(const uint8_t* data, size_t size, bool* asks) {
  *asks = false;
  uint32_t segments, words;
  if (size < 24) return size;
  std::memcpy(&segments, data, 4);
  std::memcpy(&words, data + 4, 4);
  if (segments != 0 || words > size / 8 - 1) return size;
  uint16_t kind;
  std::memcpy(&kind, data + 16, 2);
  *asks = kind == 2 || kind == 8;  // call, bootstrap
  return std::max<size_t>(8 + size_t{words} * 8, 24);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
  frugal::fuzzed_service().adopt(ends[0]);
  const int fd = ends[1];
  char answer[4096];
  while (size > 0) {
    bool asks;
    const size_t next = message(data, size, &asks);
    size_t sent = 0;
    bool open = true;
    while (sent < next && open) {
      // The server stops reading when its replies are not taken.
      pollfd both{fd, POLLIN | POLLOUT, 0};
      poll(&both, 1, -1);
      if (both.revents & POLLIN) open = recv(fd, answer, sizeof answer, 0) > 0;
      const ssize_t n = send(fd, data + sent, next - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0)
        sent += static_cast<size_t>(n);
      else if (errno != EAGAIN)
        open = false;
    }
    if (!open) break;
    data += next;
    size -= next;
    pollfd answered{fd, POLLIN, 0};
    if (asks && poll(&answered, 1, 5) > 0 && recv(fd, answer, sizeof answer, 0) <= 0) break;
  }
  shutdown(fd, SHUT_WR);
  while (recv(fd, answer, sizeof answer, 0) > 0) {
  }
  close(fd);
  return 0;
}
