// A trainer process's side: one thread reads the socket. A call is on its caller's stack. The
// caller sends its request and sleeps until the thread has put the reply there. So calls take no
// memory, except for what a reply gives.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "base/assert.h"
#include "base/forked.h"
#include "base/futex.h"
#include "base/handles.h"
#include "base/os.h"
#include "base/sync.h"
#include "base/thread.h"
#include "process/control_message.h"
#include "process/control_socket.h"
#include "process/control_structs.h"

namespace frugal {
namespace {

int64_t left_of(uint64_t until) {
  if (until == UINT64_MAX) return -1;
  const uint64_t now = now_ns();
  return until > now ? static_cast<int64_t>((until - now + 999999) / 1000000) : 0;
}

// A call under way. It belongs to its caller, and the reading thread knows it until it is finished
// or forgotten.
struct Call {
  Call* next = nullptr;
  uint64_t id = 0;
  std::atomic<uint32_t> done{0};
  frugal_error error{};
  char text[512] = "";

  // Takes what the reply to a successful call carries. Only if this succeeds too, the caller gets
  // any of it.
  virtual Status take(wire::Answer::Reader answer, Incoming& in) = 0;

  void finish(const frugal_error& how) {
    FRUGAL_ASSERT(!done.load());
    error = how;
    std::snprintf(text, sizeof text, "%s", how.message ? how.message : "");
    error.message = text;
    done.store(1, std::memory_order_release);
    futex_wake(reinterpret_cast<const uint32_t*>(&done));
  }
  void finish(Status status) {  // with this thread's error
    end_call(status);
    frugal_error how{};
    if (status != FRUGAL_OK) last_error(&how);
    finish(how);
  }
  bool wait(uint64_t until) const {  // false: it is not finished by then
    WaitTime time = WaitTime::until(until);
    while (!done.load(std::memory_order_acquire)) {
      if (time.over()) return false;
      futex_wait(reinterpret_cast<const uint32_t*>(&done), 0, &time);
    }
    return true;
  }

 protected:
  ~Call() = default;
};

constexpr char kClosed[] = "the connection to the controller was closed";

uint64_t first_number(wire::Answer::Reader answer) {
  const auto numbers = answer.getNumbers();
  return numbers.size() ? numbers[0] : kAnyJoin;
}

// Takes the numbers and descriptors of a reply.
template <class Reply>
Status take_given(wire::Answer::Reader answer, Incoming& in, Reply* reply) {
  if (in.descriptors() != answer.getDescriptors())
    return os_no_descriptor(EMFILE, "what the controller has sent");
  try {
    Vector<uint64_t> numbers;
    for (uint64_t n : answer.getNumbers()) numbers.push_back(n);
    reply->descriptors = in.take_descriptors();
    reply->numbers = std::move(numbers);
    return FRUGAL_OK;
  } catch (const std::bad_alloc&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "no memory for a reply of the controller: free memory of the machine and call "
                "again");
  }
}

Status take_table(wire::Answer::Reader answer, Incoming& in, TableReply* reply) {
  reply->id = answer.getTable().getId();
  take(answer.getTable().getInfo(), &reply->info);
  return take_given(answer, in, reply);
}

Status check_text(const char* text, const char* what) {
  if (!text || strnlen(text, kMostText + 1) <= kMostText) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT,
              "the %s '%.64s...' has more than %zu bytes: give a shorter one", what, text,
              kMostText);
}

}  // namespace

struct ControlClient::Impl final : HeapObject {
  const uint32_t generation = process_generation();
  String address;
  int socket = -1;
  Credentials controller;
  int pidfd = -1;
  Thread thread;
  std::atomic<bool> lost{false};
  std::atomic<uint32_t> joined{0};  // close_link() joins the thread
  Mutex sending;                    // one message after the other
  Mutex mutex;
  Call* calls GUARDED_BY(mutex) = nullptr;  // that wait
  uint64_t last_id GUARDED_BY(mutex) = 0;
  bool closed GUARDED_BY(mutex) = false;          // no call begins any more
  std::function<void()> ended GUARDED_BY(mutex);  // called when the connection has ended

  ~Impl() {
    ForkedDescriptors::close(socket);
    if (pidfd >= 0) close(pidfd);
  }

  Status is_lost() const {
    return fail(FRUGAL_ERR_PEER_LOST,
                "the controller at %.200s (process %d) is gone, or has ended the connection: open "
                "the engine again",
                address.c_str(), static_cast<int>(controller.pid));
  }

  void finish_all(const frugal_error& how) REQUIRES(mutex) {
    while (Call* call = calls) {
      calls = call->next;
      call->finish(how);
    }
  }
  Call** find(uint64_t id) REQUIRES(mutex) {
    Call** at = &calls;
    while (*at && (*at)->id != id) at = &(*at)->next;
    return at;
  }

  // kNothing: not sent by then.
  Progress send(Outgoing& out, uint64_t until) {
    UniqueLock lock(sending);
    Progress p;
    while ((p = out.push(socket)) == Progress::kNothing && now_ns() < until) {
      const auto wait = [&] {
        pollfd room{socket, POLLOUT, 0};
        (void)poll(&room, 1, static_cast<int>(std::min<int64_t>(left_of(until), 60000)));
      };
      // Other threads may send, unless their messages would come into the middle of this one.
      if (out.on_its_way()) {
        wait();
      } else {
        lock.unlock();
        wait();
        lock.lock();
      }
    }
    // After half a message nothing can follow. The connection ends, and all waiting calls with it.
    if (p == Progress::kEnd || (p == Progress::kNothing && out.on_its_way()))
      shutdown(socket, SHUT_RDWR);
    return p;
  }

  // Makes the call and waits for its end; `until` is given if a part of the time has passed
  // already.
  template <class Fill, class Take>
  Status call(const char* what, int64_t timeout_ms, Fill fill, Take take, uint64_t until = 0) {
    if (generation != process_generation())
      return fail(FRUGAL_ERR_FORKED,
                  "the connection to the controller belongs to the parent of this process");
    if (until == 0) until = after_ns(ns_of_ms(timeout_ms));
    struct Made final : Call {
      explicit Made(Take& t) : taking(t) {}
      Status take(wire::Answer::Reader answer, Incoming& in) override { return taking(answer, in); }
      Take& taking;
    } made(take);
    OutgoingOf<kMostRequestWords> out;
    auto request = out.begin<wire::Request>();
    fill(request);
    {
      Lock lock(mutex);
      if (closed) return fail(FRUGAL_ERR_CLOSED, kClosed);
      if (lost.load()) return is_lost();
      made.id = ++last_id;
      made.next = calls;
      calls = &made;
    }
    request.setId(made.id);
    const Progress sent = send(out, until);
    const int code = errno;
    if (sent != Progress::kRefused) (void)made.wait(sent == Progress::kEnd ? UINT64_MAX : until);
    Lock lock(mutex);  // the thread that finished it no longer uses it
    if (Call** at = find(made.id); *at) {
      *at = made.next;
      if (sent == Progress::kRefused)
        return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                          "\"%s\" cannot be sent to the controller: free memory of the machine and "
                          "call again",
                          what);
      return fail(FRUGAL_ERR_TIMEOUT,
                  "the controller at %.200s has not replied to \"%s\" within %lld ms, but may "
                  "carry it out later: call again",
                  address.c_str(), what, static_cast<long long>(timeout_ms));
    }
    return made.error.status == FRUGAL_OK ? FRUGAL_OK : fail_as(made.error);
  }
  template <class Fill>
  Status call(const char* what, int64_t timeout_ms, Fill fill, uint64_t until = 0) {
    const auto nothing = [](wire::Answer::Reader, Incoming&) { return FRUGAL_OK; };
    return call(what, timeout_ms, fill, nothing, until);
  }

  // The body of the thread that reads.
  void run() noexcept {
    IncomingOf<kMostAnswerWords> in(true);
    for (Progress p; (p = in.pull(socket)) != Progress::kEnd;) {
      if (p == Progress::kWhole) {
        if (!deliver(in)) break;
        continue;
      }
      pollfd all[] = {{socket, POLLIN, 0}, {pidfd, POLLIN, 0}};
      if (poll(all, 2, -1) < 0 && errno != EINTR) break;
      // The process is dead, even if another process holds the socket. What it sent is still read.
      if (all[1].revents) shutdown(socket, SHUT_RDWR);
    }
    shutdown(socket, SHUT_RDWR);
    std::function<void()> tell;
    {
      Lock lock(mutex);
      lost.store(true);
      frugal_error how{};
      end_call(is_lost());
      last_error(&how);
      finish_all(how);
      tell = std::move(ended);
    }
    if (tell) tell();
    // A thread that has ended and is not joined is a leak to ThreadSanitizer, in programs that exit
    // without closing.
    while (!joined.load()) futex_wait(reinterpret_cast<const uint32_t*>(&joined), 0, UINT64_MAX);
  }

  // False: the message is no reply.
  bool deliver(Incoming& in) noexcept {
    try {
      const auto answer = in.read<wire::Answer>();
      const Status status = answer.getStatus();
      UniqueLock lock(mutex);
      Call** at = find(answer.getId());
      Call* call = *at;
      if (!call) {
        lock.unlock();
        if (status == FRUGAL_OK && answer.isJoined())
          give_back(answer.getJoined(), first_number(answer));
        return true;
      }
      if (status == FRUGAL_OK) {
        const Status taken = call->take(answer, in);
        *at = call->next;
        call->finish(taken);
        return true;
      }
      const frugal_error how{status < 0 ? status : FRUGAL_ERR_INTERNAL, answer.getSystemCode(),
                             answer.getDeviceCode(), 0, answer.getMessage().cStr()};
      *at = call->next;
      call->finish(how);
      return true;
    } catch (...) {
      return false;
    }
  }

  // Gives back a rank that joined after its call had ended. No thread waits for the reply.
  void give_back(uint32_t rank, uint64_t joined) noexcept {
    OutgoingOf<kMostRequestWords> out;
    fill_leave(out.begin<wire::Request>(), rank, true, joined);
    if (send(out, 0) != Progress::kWhole) shutdown(socket, SHUT_RDWR);
  }
  static void fill_leave(wire::Request::Builder request, uint32_t rank, bool lost,
                         uint64_t joined) {
    auto leave = request.initLeave();
    leave.setRank(rank);
    leave.setLost(lost);
    leave.setJoined(joined);
  }

  void close_link() {
    {
      Lock lock(mutex);
      closed = true;
      finish_all({FRUGAL_ERR_CLOSED, 0, 0, 0, kClosed});
    }
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
    joined.store(1);
    futex_wake(reinterpret_cast<const uint32_t*>(&joined));
    if (thread.joinable()) thread.join();
  }

  Status attach(uint32_t version, int64_t timeout_ms, uint64_t until, bool* again) {
    FRUGAL_TRY(peer_of(socket, &controller));
    FRUGAL_TRY(pidfd_of(socket, controller.pid, &pidfd));
    thread = quiet_thread([this] { run(); });
    const auto fill = [&](wire::Request::Builder r) { r.setAttach(version); };
    const Status s = call("attach", timeout_ms, fill, until);
    // A controller that is stopping, or is full, may be followed by one that is not.
    *again = s == FRUGAL_ERR_PEER_LOST || s == FRUGAL_ERR_CLOSED;
    return s;
  }
};

Status ControlClient::connect(const char* address, int64_t timeout_ms,
                              std::unique_ptr<ControlClient>* out, uint32_t version) {
  out->reset();
  const uint64_t until = after_ns(ns_of_ms(timeout_ms));
  try {
    for (uint64_t pause = 1000000;; pause = std::min<uint64_t>(pause * 2, 50000000)) {
      Attempt attempt = connect_once(address);
      bool again = attempt.again;
      Status s = attempt.status;
      if (attempt.socket >= 0) {
        struct Open {
          int socket;
          ~Open() { ForkedDescriptors::close(socket); }
        } open{attempt.socket};
        std::unique_ptr<ControlClient> client(new ControlClient(nullptr));
        client->impl_ = new Impl;
        client->impl_->socket = std::exchange(open.socket, -1);
        client->impl_->address = address;
        s = client->impl_->attach(version, timeout_ms, until, &again);
        if (s == FRUGAL_OK) {
          *out = std::move(client);
          return FRUGAL_OK;
        }
      }
      if (!again) return s;
      if (now_ns() + pause >= until) {
        if (attempt.socket >= 0)
          return fail(
              s,
              "the controller at %.200s ends the connection at once: it is stopping, has as many "
              "connections as it takes, is of another user, or lacks memory, threads or "
              "descriptors",
              address);
        return fail_errno(FRUGAL_ERR_TIMEOUT, attempt.code,
                          "no controller at %.200s within %lld ms: start one, or raise timeout_ms",
                          address, static_cast<long long>(timeout_ms));
      }
      sleep_ns(pause);
    }
  } catch (const std::exception&) {
    return no_thread("a connection to the controller");
  }
}

void ControlClient::on_end(std::function<void()> ended) {
  UniqueLock lock(impl_->mutex);
  if (!impl_->lost.load()) {
    impl_->ended = std::move(ended);
    return;
  }
  lock.unlock();
  ended();
}

void ControlClient::disconnect() {
  // In a forked child there is no thread to wait for. What it inherited is left as it is.
  if (impl_->generation == process_generation()) impl_->close_link();
}

ControlClient::~ControlClient() {
  if (!impl_ || impl_->generation != process_generation()) return;
  impl_->close_link();
  delete impl_;
}

Status ControlClient::ping(int64_t timeout_ms) {
  return impl_->call("ping", timeout_ms, [](wire::Request::Builder r) { r.setPing(); });
}

Status ControlClient::open(const frugal_config& config, int64_t timeout_ms, OpenReply* reply) {
  return impl_->call(
      "open", timeout_ms, [&](wire::Request::Builder r) { put(config, r.initOpen()); },
      [&](wire::Answer::Reader answer, Incoming& in) {
        take(answer.getConfig(), &reply->config);
        return take_given(answer, in, reply);
      });
}

Status ControlClient::create_table(const frugal_table_config& config, int64_t timeout_ms,
                                   TableReply* reply) {
  FRUGAL_TRY(check_text(config.name, "table's name"));
  return impl_->call(
      "createTable", timeout_ms,
      [&](wire::Request::Builder r) { put(config, r.initCreateTable()); },
      [&](wire::Answer::Reader answer, Incoming& in) { return take_table(answer, in, reply); });
}

Status ControlClient::find_table(const char* name, int64_t timeout_ms, TableReply* reply) {
  FRUGAL_TRY(check_text(name, "table's name"));
  return impl_->call(
      "findTable", timeout_ms, [&](wire::Request::Builder r) { r.setFindTable(name); },
      [&](wire::Answer::Reader answer, Incoming& in) { return take_table(answer, in, reply); });
}

Status ControlClient::drop_table(uint64_t id, int64_t timeout_ms) {
  return impl_->call("dropTable", timeout_ms,
                     [&](wire::Request::Builder r) { r.setDropTable(id); });
}

Status ControlClient::join(const frugal_trainer_config& config, int64_t timeout_ms,
                           JoinReply* reply) {
  FRUGAL_TRY(check_text(config.device, "trainer's device"));
  bool joined = false;
  uint64_t number = kAnyJoin;
  const Status s = impl_->call(
      "join", timeout_ms, [&](wire::Request::Builder r) { put(config, r.initJoin()); },
      [&](wire::Answer::Reader answer, Incoming& in) {
        number = first_number(answer);
        joined = true;
        return take_given(answer, in, reply);
      });
  if (s == FRUGAL_OK || !joined) return s;
  const KeepError why;  // it has joined, but what a trainer needs has not come
  (void)leave(config.rank, true, timeout_ms, number);
  return s;
}

Status ControlClient::leave(uint32_t rank, bool lost, int64_t timeout_ms, uint64_t joined) {
  return impl_->call("leave", timeout_ms,
                     [&](wire::Request::Builder r) { Impl::fill_leave(r, rank, lost, joined); });
}

Status ControlClient::stats(int64_t timeout_ms, frugal_stats* stats) {
  return impl_->call(
      "stats", timeout_ms, [](wire::Request::Builder r) { r.setStats(); },
      [&](wire::Answer::Reader answer, Incoming&) -> Status {
        std::array<uint64_t, sizeof *stats / sizeof(uint64_t)> all;
        const auto numbers = answer.getNumbers();
        if (numbers.size() != all.size())
          return fail(FRUGAL_ERR_INTERNAL, "the controller has other statistics");
        for (capnp::uint i = 0; i < numbers.size(); ++i) all[i] = numbers[i];
        *stats = std::bit_cast<frugal_stats>(all);
        return FRUGAL_OK;
      });
}

Status ControlClient::health(int64_t timeout_ms, int32_t* health) {
  return impl_->call(
      "health", timeout_ms, [](wire::Request::Builder r) { r.setHealth(); },
      [&](wire::Answer::Reader answer, Incoming&) {
        *health = answer.getHealth();
        return FRUGAL_OK;
      });
}

Status ControlClient::committed(int64_t timeout_ms, uint64_t* step) {
  return impl_->call(
      "committed", timeout_ms, [](wire::Request::Builder r) { r.setCommitted(); },
      [&](wire::Answer::Reader answer, Incoming&) {
        *step = answer.getStep();
        return FRUGAL_OK;
      });
}

pid_t ControlClient::controller_pid() const { return impl_->controller.pid; }
int ControlClient::controller_pidfd() const { return impl_->pidfd; }
bool ControlClient::lost() const { return impl_->lost.load(); }

}  // namespace frugal
