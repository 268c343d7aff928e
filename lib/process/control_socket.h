// The socket of the control plane: its address, its lock, the process at its other end.
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
// A pidfd of the process at the other end; -1 if the kernel has none. `pid` is peer_of()'s.
Status pidfd_of(int socket, pid_t pid, int* out);
// Returns `fd`. If that is the number of a standard stream, closes it and returns a duplicate with
// a greater number: a program that has closed its standard streams goes on to write to their
// numbers. -1 with errno: no duplicate can be made.
int above_standard(int fd);

// The controller's address: the lock that a living controller holds, and the socket that listens.
// The socket is never open to other users, whatever the process's umask is.
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
  int folder_ = -1;  // a relative path may mean another folder when the files are removed
  int lock_ = -1;
  int listener_ = -1;
  bool bound_ = false;
  uint64_t device_ = 0, inode_ = 0;  // of the socket's file
};

// One attempt to connect.
struct Attempt {
  int socket = -1;            // nonblocking
  bool again = false;         // there is none, and a later attempt may succeed
  Status status = FRUGAL_OK;  // if not `again`, with its message
  int code = 0;               // errno
};
Attempt connect_once(const char* address);

}  // namespace frugal
