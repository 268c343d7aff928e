// A message with descriptors, of a kind that a controller accepts from no process.
#pragma once
#include <sys/socket.h>

#include <cstring>

// At most 253 of them. Returns what sendmsg returns.
inline ssize_t send_descriptors(int socket, const void* bytes, size_t size, const int* fds,
                                size_t n) {
  iovec piece{const_cast<void*>(bytes), size};
  alignas(cmsghdr) char room[CMSG_SPACE(253 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = CMSG_SPACE(n * sizeof(int));
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(n * sizeof(int));
  std::memcpy(CMSG_DATA(c), fds, n * sizeof(int));
  return sendmsg(socket, &message, MSG_NOSIGNAL);
}
