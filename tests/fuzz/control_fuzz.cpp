// Bytes of a peer to the controller's socket. The service must live on: whatever comes, it ends the
// connection when the peer has ended its side, and goes on to answer others.
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "fuzz/control_service.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  frugal::ControlServer& server = frugal::fuzzed_service();
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
  server.adopt(ends[0]);
  // The server stops reading when its answers are not taken, so both go on at once.
  bool open = true;
  while (open) {
    if (size > 0) {
      ssize_t n = send(ends[1], data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        data += n;
        size -= static_cast<size_t>(n);
      } else if (errno != EAGAIN) {
        size = 0;
      }
      if (size == 0) shutdown(ends[1], SHUT_WR);
    } else {
      shutdown(ends[1], SHUT_WR);
    }
    char answer[4096];
    ssize_t n = recv(ends[1], answer, sizeof answer, size > 0 ? MSG_DONTWAIT : 0);
    open = n > 0 || (n < 0 && errno == EAGAIN);
  }
  close(ends[1]);
  return 0;
}
