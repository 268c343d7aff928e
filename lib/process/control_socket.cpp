#include "process/control_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/assert.h"
#include "base/forked.h"
#include "base/os.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace frugal {
namespace {

Status socket_address(const char* address, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  const size_t length = address ? std::strlen(address) : 0;
  if (length == 0)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the controller's address is empty: give the path of a socket");
  if (length >= sizeof out->sun_path)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the controller's address has %zu bytes, a socket's path at most %zu: %.200s",
                length, sizeof out->sun_path - 1, address);
  std::memcpy(out->sun_path, address, length);
  return FRUGAL_OK;
}

int new_socket() {
  return ForkedDescriptors::open(
      [] { return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

// The status if the system refuses what a controller needs.
Status refused(int code) {
  const bool lacks =
      code == ENOMEM || code == ENOBUFS || code == EMFILE || code == ENFILE || code == ENOLCK;
  return lacks ? FRUGAL_ERR_OUT_OF_MEMORY : FRUGAL_ERR_UNSUPPORTED;
}

// The status if a file cannot be made at a path.
Status path_status(int code) {
  switch (code) {
    case ENOENT:
    case ENOTDIR:
    case EACCES:
    case EPERM:
    case EROFS:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return FRUGAL_ERR_INVALID_ARGUMENT;
    case ENOSPC:
      return FRUGAL_ERR_OUT_OF_MEMORY;
    default:
      return refused(code);
  }
}

}  // namespace

Status peer_of(int socket, Credentials* out) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    return fail_errno(FRUGAL_ERR_UNSUPPORTED, errno,
                      "this system, or a sandbox, does not name the process at the other end "
                      "of a socket (SO_PEERCRED), which trainers in other processes need: use "
                      "threads of one process");
  *out = {credentials.pid, credentials.uid};
  return FRUGAL_OK;
}

Status pidfd_of(int socket, pid_t pid, int* out) {
  *out = -1;
  auto lacks = [](int code) { return code == EMFILE || code == ENFILE || code == ENOMEM; };
  socklen_t size = sizeof *out;
  // The socket's own pidfd is the right one even if the process has ended and another has its
  // number.
  int code = getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, out, &size) == 0 ? 0 : errno;
#ifdef SYS_pidfd_open
  if (code != 0 && !lacks(code)) {
    *out = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    code = *out >= 0 ? 0 : errno;
  }
#endif
  if (!lacks(code)) return FRUGAL_OK;
  return os_no_descriptor(code, "the watch of the process at the other end of a socket");
}

int above_standard(int fd) {
  if (fd > STDERR_FILENO || fd < 0) return fd;
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int code = errno;
  close(fd);
  errno = code;
  return moved;
}

Status ControlAddress::take(const char* address) {
  FRUGAL_ASSERT(folder_ < 0 && lock_ < 0 && listener_ < 0);
  sockaddr_un checked;
  FRUGAL_TRY(socket_address(address, &checked));
  address_ = address;
  lock_path_ = address_ + ".lock";
  const size_t slash = address_.rfind('/');
  const String folder =
      slash == String::npos ? "." : address_.substr(0, std::max<size_t>(slash, 1));
  folder_ = ForkedDescriptors::open(
      [&] { return open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC); });
  Status s = folder_ >= 0 ? lock() : no_lock(errno);
  if (s == FRUGAL_OK) s = bind();
  if (s != FRUGAL_OK) leave();
  return s;
}

Status ControlAddress::no_lock(int code) const {
  if (code == EMFILE || code == ENFILE) return os_no_descriptor(code, "the controller's lock");
  return fail_errno(path_status(code), code, "the controller's lock %s cannot be made%s",
                    lock_path_.c_str(),
                    code == ENOENT ? ": is its folder there?" : ": choose another address");
}

Status ControlAddress::lock() {
  for (;;) {
    lock_ = ForkedDescriptors::open([&] {
      return open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    });
    if (lock_ < 0) {
      return no_lock(errno);
    }
    if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      const int code = errno;
      ForkedDescriptors::close(lock_);
      lock_ = -1;
      if (code == EWOULDBLOCK)
        return fail(FRUGAL_ERR_EXISTS,
                    "a controller lives at %s (%s is locked); stop it or choose another address",
                    address_.c_str(), lock_path_.c_str());
      return fail_errno(
          refused(code), code,
          "the controller's lock %s cannot be taken: choose an address on another file system",
          lock_path_.c_str());
    }
    // A controller that stops removes the file before it releases the lock, so the locked file may
    // have no name any more.
    struct stat mine, there;
    if (fstat(lock_, &mine) == 0 && lstat(lock_path_.c_str(), &there) == 0 &&
        mine.st_ino == there.st_ino && mine.st_dev == there.st_dev)
      return FRUGAL_OK;
    ForkedDescriptors::close(lock_);
    lock_ = -1;
  }
}

Status ControlAddress::bind() {
  sockaddr_un name;
  FRUGAL_TRY(socket_address(address_.c_str(), &name));
  struct stat there;
  if (lstat(address_.c_str(), &there) == 0) {
    if (!S_ISSOCK(there.st_mode))
      return fail(FRUGAL_ERR_EXISTS,
                  "%s is there and is no socket; remove it or choose another address",
                  address_.c_str());
    // No process holds the lock: the controller that made the socket is dead.
    if (unlink(address_.c_str()) != 0)
      return fail_errno(path_status(errno), errno,
                        "the stale socket %s cannot be removed: remove it, or choose another "
                        "address",
                        address_.c_str());
  }
  listener_ = new_socket();
  if (listener_ < 0) return os_no_descriptor(errno, "the controller's socket");
  // The file gets the mode of the socket, less what the umask takes: it is never wider than this.
  if (fchmod(listener_, 0600) != 0)
    return fail_errno(refused(errno), errno,
                      "the mode of the socket for %s cannot be set: a sandbox may forbid it",
                      address_.c_str());
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0) {
    const int code = errno;
    return fail_errno(code == EADDRINUSE ? FRUGAL_ERR_EXISTS : path_status(code), code,
                      "the controller's socket cannot be made at %s: choose another address",
                      address_.c_str());
  }
  bound_ = true;
  const bool found = lstat(address_.c_str(), &there) == 0;
  if (found) {
    device_ = there.st_dev;
    inode_ = there.st_ino;
  }
  if (!found || (there.st_mode & 077) != 0)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "this system makes sockets that other users can open; %s is not served: choose an "
                "address on another file system",
                address_.c_str());
  if (chmod(address_.c_str(), 0600) != 0)  // the umask may have taken from the owner, too
    return fail_errno(refused(errno), errno,
                      "the mode of %s cannot be set: choose an address on another file system",
                      address_.c_str());
  if (listen(listener_, 128) != 0)
    return fail_errno(
        refused(errno), errno,
        "the controller's socket at %s cannot listen: choose an address on another file system",
        address_.c_str());
  return FRUGAL_OK;
}

// If the files were removed meanwhile, those at the paths may be another controller's.
void ControlAddress::leave() {
  auto remove = [&](const String& path, uint64_t device, uint64_t inode) {
    const char* name = path.c_str() + (path.rfind('/') + 1);  // npos + 1 is 0
    struct stat there;
    if (fstatat(folder_, name, &there, AT_SYMLINK_NOFOLLOW) == 0 && there.st_dev == device &&
        there.st_ino == inode)
      unlinkat(folder_, name, 0);
  };
  if (bound_) remove(address_, device_, inode_);
  bound_ = false;
  ForkedDescriptors::close(listener_);
  listener_ = -1;
  struct stat mine;
  if (lock_ >= 0 && fstat(lock_, &mine) == 0) remove(lock_path_, mine.st_dev, mine.st_ino);
  ForkedDescriptors::close(lock_);
  lock_ = -1;
  ForkedDescriptors::close(folder_);
  folder_ = -1;
}

Attempt connect_once(const char* address) {
  Attempt out;
  sockaddr_un name;
  out.status = socket_address(address, &name);
  if (out.status != FRUGAL_OK) return out;
  const int made = new_socket();
  if (made < 0) {
    out.status = os_no_descriptor(errno, "a socket to the controller");
    return out;
  }
  if (connect(made, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0) {
    out.code = errno;
    ForkedDescriptors::close(made);
    // There is no file yet, no process listens (any more), or the queue of connections is full.
    struct stat there;
    if (out.code == ECONNREFUSED && stat(address, &there) == 0 && !S_ISSOCK(there.st_mode)) {
      out.status = fail(FRUGAL_ERR_INVALID_ARGUMENT,
                        "%s is there and is no socket: give the address of a controller", address);
      return out;
    }
    out.again = out.code == ENOENT || out.code == ECONNREFUSED || out.code == EAGAIN ||
                out.code == EINTR || out.code == ECONNRESET;
    if (!out.again)
      out.status =
          fail_errno(path_status(out.code), out.code,
                     "the controller at %s cannot be connected to: is it another user's?", address);
    return out;
  }
  Credentials other;
  out.status = peer_of(made, &other);
  if (out.status == FRUGAL_OK && other.uid != geteuid())
    out.status =
        fail(FRUGAL_ERR_INVALID_ARGUMENT,
             "the controller at %s is of user %u, this process of user %u; both must be the same",
             address, static_cast<unsigned>(other.uid), static_cast<unsigned>(geteuid()));
  if (out.status != FRUGAL_OK) {
    ForkedDescriptors::close(made);
    return out;
  }
  out.socket = made;
  return out;
}

}  // namespace frugal
