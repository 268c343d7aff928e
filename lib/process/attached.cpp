#include "process/attached.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/forked.h"
#include "process/control_socket.h"

namespace frugal {

Attached::~Attached() {
  calls.reset();
  engine_->arena().region_publisher()->forget(told);
  if (large) rings_.give(pid_);
  if (pidfd >= 0) close(pidfd);
}

Status Ends::open(int socket) {
  const bool made = ForkedDescriptors::open(sockets, [](int(&fds)[2]) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return false;
    // The same size on every system: a slow reader has time, and a suspended one keeps at most so
    // much.
    constexpr int kBytes = 212992;
    (void)setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &kBytes, sizeof kBytes);
    for (int& fd : fds) fd = above_standard(fd);
    return true;
  });
  connection =
      ForkedDescriptors::open([&] { return fcntl(socket, F_DUPFD_CLOEXEC, STDERR_FILENO + 1); });
  if (made && sockets[0] >= 0 && sockets[1] >= 0 && connection >= 0) return FRUGAL_OK;
  return os_no_descriptor(errno, "the socket over which the controller publishes its memory");
}

Ends::~Ends() {
  for (int fd : {sockets[0], sockets[1], connection}) ForkedDescriptors::close(fd);
}

}  // namespace frugal
