// The socket of the control plane: its address, its lock, who is at the other end.
#pragma once
#include <sys/types.h>

#include "base/heap.h"
#include "base/status.h"

namespace frugal {

// A process at the other end of a Unix-domain socket.
struct Credentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
Status peer_of(int socket, Credentials* out);
// A pidfd of the process at the other end; -1 where the kernel has none. `pid` is peer_of()'s.
Status pidfd_of(int socket, pid_t pid, int* out);
// The descriptor, which is closed where it has to be another: a program that has closed its
// standard descriptors goes on to write to their numbers. -1 and errno: there is no other.
int above_standard(int fd);

// The controller's place: the lock that a living controller holds, and the socket that listens. The
// socket is never open to other users, whatever the process's umask is.
class ControlAddress : public HeapObject {
 public:
  ~ControlAddress() { leave(); }
  Status take(const char* address);
  void leave();  // removes both files
  int listener() const { return listener_; }

 private:
  Status lock();
  Status no_lock(int code) const;
  Status bind();

  String address_, lock_path_;
  int folder_ = -1;  // a relative path may mean another place when the files are removed
  int lock_ = -1;
  int listener_ = -1;
  bool bound_ = false;
  uint64_t device_ = 0, inode_ = 0;  // of the socket's file
};

// One attempt to connect.
struct Attempt {
  int socket = -1;     // not blocking
  bool again = false;  // there is none, and a later attempt may do better
  Status status = FRUGAL_OK;  // otherwise, with its message
  int code = 0;               // errno
};
Attempt connect_once(const char* address);

}  // namespace frugal
