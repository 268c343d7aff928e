// The controller's side: one thread accepts connections, and each connection has threads of its
// own. One of them waits for the next request. A thread with a request makes the handler's call and
// sends the reply, while another waits. So nothing is queued here. Requests beyond a peer's threads
// stay in its socket, and so do replies that it does not read.
#include <fcntl.h>
#include <kj/exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>

#include "base/assert.h"
#include "base/condition.h"
#include "base/forked.h"
#include "base/handles.h"
#include "base/os.h"
#include "base/retry.h"
#include "process/control_message.h"
#include "process/control_socket.h"
#include "process/control_structs.h"

namespace frugal {
namespace {

constexpr size_t kThreadsOfPeer = 8;  // concurrent calls of one connection
// The pause between checks of an open that takes longer than the time to open.
constexpr int kLookMs = 1000;
// Connections that have not attached. Of more, one is ended: the oldest of the process that has
// most.
constexpr size_t kNotAttached = 64;

Status stopping() {
  return fail(FRUGAL_ERR_CLOSED, "the controller is stopping: attach to another");
}

template <class Numbers>
void put_numbers(const Numbers& from, wire::Answer::Builder answer) {
  auto to = answer.initNumbers(static_cast<capnp::uint>(from.size()));
  for (capnp::uint i = 0; i < to.size(); ++i) to.set(i, from[i]);
}

// What a reply gives, until it is sent: the handler's descriptors, and those that were opened for
// it.
struct Given {
  std::shared_ptr<void> keep;
  Vector<int> descriptors, opened;
  ~Given() {
    for (int fd : opened) close(fd);
  }
  template <class Reply>
  Status take(Reply& reply, wire::Answer::Builder answer) noexcept {
    const Vector<uint64_t>& numbers = reply.numbers;
    if (reply.descriptors.size() > kMostDescriptors || numbers.size() > kMostNumbers)
      return fail(FRUGAL_ERR_INTERNAL, "a reply with %zu descriptors and %zu numbers is too large",
                  reply.descriptors.size(), numbers.size());
    try {
      opened.reserve(reply.descriptors.size());
    } catch (const std::bad_alloc&) {
      return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "the controller has no memory for a reply: free memory of the machine and call "
                  "again");
    }
    for (int& fd : reply.descriptors) {
      if (std::find(reply.read_only.begin(), reply.read_only.end(), fd) == reply.read_only.end())
        continue;
      fd = above_standard(os_read_only(fd));
      if (fd < 0)
        return errno == EBADF
                   ? fail_errno(FRUGAL_ERR_INTERNAL, errno, "a descriptor of a reply is closed")
                   : os_no_descriptor(errno, "a reply of the controller");
      opened.push_back(fd);
    }
    keep = std::move(reply.keep);
    descriptors = std::move(reply.descriptors);
    answer.setDescriptors(static_cast<uint32_t>(descriptors.size()));
    put_numbers(numbers, answer);
    return FRUGAL_OK;
  }
};

}  // namespace

struct ControlServer::Impl final : HeapObject {
  class Connection;

  ControlHandler* handler = nullptr;
  ControlLimits limits;
  const uint32_t generation = process_generation();
  ControlAddress address;
  int spare = -1;  // given up for a moment when there are no descriptors to accept with
  int bell = -1;   // rung when a connection has ended
  int end = -1;    // rung for good by stop()
  Thread thread;
  Mutex stop_mutex;
  bool stopped GUARDED_BY(stop_mutex) = false;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> next_id{1};
  Mutex mutex;
  Vector<std::unique_ptr<Connection>> connections GUARDED_BY(mutex);  // the oldest first
  Condition fewer;  // a connection has ended, or is to end

  ~Impl() {
    for (int fd : {spare, bell, end})
      if (fd >= 0) close(fd);
  }
  void run() noexcept;
  bool accept_some();
  int accept_one();
  void add(int socket) noexcept;
  void reap() noexcept;
  Status attach(Connection& connection, uint32_t version);
  size_t attached_of(pid_t pid, bool* leaving) const REQUIRES(mutex);
};

class ControlServer::Impl::Connection : public HeapObject {
 public:
  Connection(Impl& server, int socket, pid_t pid)
      : server_(server), socket_(socket), peer_{pid, -1, server.next_id++, socket} {}
  ~Connection() {
    for (Thread& t : threads_)
      if (t.joinable()) t.join();
    ForkedDescriptors::close(socket_);
    if (peer_.pidfd >= 0) close(peer_.pidfd);
  }

  // False: there is no thread for it.
  bool hire() noexcept {
    Lock lock(mutex_);
    if (started_ == kThreadsOfPeer) return false;
    try {
      threads_[started_] = quiet_thread([this] { body(); });
    } catch (const std::exception&) {
      return false;
    }
    ++started_;
    return true;
  }
  // Its threads end soon. What was sent by then is still read, and replied to as far as possible.
  void end() noexcept { shutdown(socket_, SHUT_RDWR); }
  void read_no_more() noexcept { shutdown(socket_, SHUT_RD); }
  pid_t pid() const { return peer_.pid; }
  bool attached() const { return attached_.load(); }
  Status attach() {
    FRUGAL_TRY(pidfd_of(socket_, peer_.pid, &peer_.pidfd));
    attached_.store(true);
    return FRUGAL_OK;
  }
  bool ended() const { return ended_.load(); }
  uint64_t attach_by() const { return taken_ + server_.limits.attach_ns; }
  // The peer has closed it.
  bool hung_up() const {
    pollfd p{socket_, POLLRDHUP, 0};
    return poll(&p, 1, 0) == 1;
  }
  bool given_up = false;  // with the server's mutex

 private:
  void body() noexcept {
    IncomingOf<kMostRequestWords> in(false);
    OutgoingOf<kMostAnswerWords> out;
    while (next(in)) {
      if (!answer(in, out)) {
        over_.store(true);
        end();
      }
      --busy_;
    }
    leave();
  }

  // Waits for the next request, one thread at a time. False: none comes. A request that has come is
  // taken before wait() checks the time: this process may be the one that was late.
  bool next(Incoming& in) noexcept {
    Lock lock(reading_);
    Progress p = Progress::kNothing;
    while (!over_.load() && (p = in.pull(socket_)) == Progress::kNothing)
      if (!wait(POLLIN)) break;
    if (p != Progress::kWhole) {
      over_.store(true);
      return false;
    }
    // Another thread has to see what comes meanwhile. If there is none, that waits in the socket.
    if (++busy_ == started_ && attached()) (void)hire();
    return true;
  }

  struct Opening {
    explicit Opening(std::atomic<size_t>& n) : n_(n) { ++n_; }
    ~Opening() { --n_; }
    std::atomic<size_t>& n_;
  };
  // By when it must have attached, or opened the engine.
  uint64_t due() const {
    if (!attached()) return attach_by();
    return opened_.load() ? UINT64_MAX : taken_ + server_.limits.open_ns;
  }
  // That time has passed, and no open is under way.
  bool late() const {
    const bool opens = opening_.load() > 0;  // read before what an open may change
    const uint64_t by = due();
    return by != UINT64_MAX && now_ns() >= by && !opens;
  }

  // Waits until there may be progress. False: there is nothing to wait for.
  bool wait(short events) noexcept {
    pollfd all[] = {{socket_, events, 0}, {peer_.pidfd, POLLIN, 0}, {server_.end, POLLIN, 0}};
    if (late()) return false;
    int ms = -1;
    if (const uint64_t by = due(), now = now_ns(); by != UINT64_MAX)
      ms = now < by ? static_cast<int>(std::min<uint64_t>((by - now) / 1000000 + 1, 3600000))
                    : kLookMs;
    const int n = poll(all, 3, ms);
    if (n < 0) return errno == EINTR;
    // The process is dead, even if another process holds the socket. What it sent is still read.
    if (all[1].revents) end();
    return all[0].revents || all[1].revents || !all[2].revents;
  }

  // False: the connection is to end.
  bool answer(Incoming& in, Outgoing& out) noexcept {
    try {
      const auto request = in.read<wire::Request>();
      if (request.isAttach() == attached()) return false;
      // Only the request that it was late with may come late.
      if (!request.isAttach() && !request.isOpen() && late()) return false;
      Given given;
      const Status s = make(request, out, given);
      if (end_call(s) != FRUGAL_OK) {
        frugal_error error;
        last_error(&error);
        auto answer = out.begin<wire::Answer>();
        answer.setId(request.getId());
        answer.setStatus(s);
        answer.setSystemCode(error.system_code);
        answer.setDeviceCode(error.device_code);
        answer.setMessage(error.message);
        given.descriptors.clear();
      }
      return send(out, given);
    } catch (...) {
      return false;  // it is no message
    }
  }

  Status make(wire::Request::Reader request, Outgoing& out, Given& given) {
    begin_call();
    auto answer = out.begin<wire::Answer>();
    answer.setId(request.getId());
    if (request.isAttach()) return server_.attach(*this, request.getAttach());
    if (request.isPing()) return FRUGAL_OK;
    try {
      return server_.stopping.load() ? frugal::stopping()
                                     : call(*server_.handler, request, answer, given);
    } catch (const kj::Exception&) {
      throw;
    } catch (const std::bad_alloc&) {
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "the controller has no memory for the call");
    } catch (...) {
      return fail(FRUGAL_ERR_INTERNAL, "an exception in the controller");
    }
  }

  // A case for each call. Nothing fails once the handler has done what was asked, except for
  // `given`.
  Status call(ControlHandler& handler, wire::Request::Reader request, wire::Answer::Builder answer,
              Given& given) {
    switch (request.which()) {
      case wire::Request::OPEN: {
        frugal_config config;
        take(request.getOpen(), &config);
        OpenReply reply;
        frugal_config_init(&reply.config);
        const Opening opening(opening_);
        FRUGAL_TRY(handler.open(peer_, config, &reply));
        put(reply.config, answer.initConfig());
        FRUGAL_TRY(given.take(reply, answer));
        opened_.store(true);
        return FRUGAL_OK;
      }
      case wire::Request::CREATE_TABLE: {
        frugal_table_config config;
        take(request.getCreateTable(), &config);
        return table([&](TableReply* reply) { return handler.create_table(peer_, config, reply); },
                     answer, given);
      }
      case wire::Request::FIND_TABLE: {
        const char* name = request.getFindTable().cStr();
        return table([&](TableReply* reply) { return handler.find_table(peer_, name, reply); },
                     answer, given);
      }
      case wire::Request::DROP_TABLE:
        return handler.drop_table(peer_, request.getDropTable());
      case wire::Request::JOIN: {
        frugal_trainer_config config;
        take(request.getJoin(), &config);
        JoinReply reply;
        FRUGAL_TRY(handler.join(peer_, request.getId(), config, &reply));
        const uint64_t joined = reply.numbers.empty() ? kAnyJoin : reply.numbers[0];
        answer.setJoined(config.rank);
        // If this fails, no process learns that it has joined.
        const Status s = given.take(reply, answer);
        if (s == FRUGAL_OK) return s;
        const KeepError why;
        (void)handler.leave(peer_, request.getId(), config.rank, true, joined);
        return s;
      }
      case wire::Request::LEAVE: {
        const auto asked = request.getLeave();
        return handler.leave(peer_, request.getId(), asked.getRank(), asked.getLost(),
                             asked.getJoined());
      }
      case wire::Request::STATS: {
        frugal_stats stats{};
        stats.struct_size = sizeof stats;
        FRUGAL_TRY(handler.stats(peer_, &stats));
        const auto numbers =
            std::bit_cast<std::array<uint64_t, sizeof stats / sizeof(uint64_t)>>(stats);
        put_numbers(numbers, answer);
        return FRUGAL_OK;
      }
      case wire::Request::HEALTH: {
        int32_t health = 0;
        FRUGAL_TRY(handler.health(peer_, &health));
        answer.setHealth(health);
        return FRUGAL_OK;
      }
      case wire::Request::COMMITTED: {
        uint64_t step = FRUGAL_NO_STEP;
        FRUGAL_TRY(handler.committed(peer_, &step));
        answer.setStep(step);
        return FRUGAL_OK;
      }
      default:
        return fail(FRUGAL_ERR_UNSUPPORTED, "the controller does not know this call");
    }
  }

  template <class Make>
  Status table(Make make, wire::Answer::Builder answer, Given& given) {
    TableReply reply;
    reply.info = {};
    reply.info.struct_size = sizeof reply.info;
    FRUGAL_TRY(make(&reply));
    auto to = answer.initTable();
    to.setId(reply.id);
    put(reply.info, to.initInfo());
    return given.take(reply, answer);
  }

  bool send(Outgoing& out, const Given& given) noexcept {
    Lock lock(writing_);
    Progress p;
    while ((p = out.push(socket_, given.descriptors.data(), given.descriptors.size())) ==
           Progress::kNothing)
      if (!wait(POLLOUT)) break;
    if (p != Progress::kWhole) end();  // so that the call that waits for the reply ends
    return true;                       // what the peer has sent is still read
  }

  // The last thread notifies the handler.
  void leave() noexcept {
    {
      Lock lock(mutex_);
      FRUGAL_ASSERT(left_ < started_);
      if (++left_ != started_) return;
    }
    FRUGAL_ASSERT(busy_.load() == 0);  // the last call has returned
    end();
    if (attached()) retry_for_memory([&] { server_.handler->gone(peer_); });
    {
      Lock lock(server_.mutex);
      ended_.store(true);
      server_.fewer.notify_all();
    }
    eventfd_write(server_.bell, 1);
  }

  Impl& server_;
  const int socket_;
  Peer peer_;
  const uint64_t taken_ = now_ns();
  std::atomic<bool> attached_{false}, opened_{false}, over_{false}, ended_{false};
  Mutex reading_, writing_;
  Mutex mutex_;
  Thread threads_[kThreadsOfPeer] GUARDED_BY(mutex_);
  std::atomic<size_t> started_{0};  // changed with the mutex held
  size_t left_ GUARDED_BY(mutex_) = 0;
  std::atomic<size_t> busy_{0}, opening_{0};
};

void ControlServer::Impl::run() noexcept {
  bool full = false, serves = true;
  for (;;) {
    pollfd all[] = {{serves ? end : -1, POLLIN, 0},
                    {bell, POLLIN, 0},
                    {serves && !full ? address.listener() : -1, POLLIN, 0}};
    if (poll(all, 3, full ? 100 : -1) < 0) sleep_ns(10'000'000);  // no memory for a moment
    eventfd_t rings;
    if (all[1].revents) eventfd_read(bell, &rings);
    reap();
    UniqueLock lock(mutex);
    if (all[0].revents) {
      // Calls that have not begun are refused; there are no more of them than have come by now.
      serves = false;
      for (auto& c : connections) c->read_no_more();
    }
    if (!serves && connections.empty()) return;
    lock.unlock();
    full = all[2].revents && !accept_some();
  }
}

// False: there is no descriptor to accept a connection with.
bool ControlServer::Impl::accept_some() {
  for (int i = 0; i < 16; ++i) {
    int socket = accept_one();
    if (socket < 0 && (errno == EMFILE || errno == ENFILE) && spare >= 0) {
      close(spare);
      socket = accept_one();
      ForkedDescriptors::close(socket);
      spare = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      return socket >= 0;
    }
    if (socket < 0) return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
    add(socket);
  }
  return true;
}

int ControlServer::Impl::accept_one() {
  return ForkedDescriptors::open(
      [&] { return accept4(address.listener(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
}

// Without memory, or a thread, the connection is ended.
void ControlServer::Impl::add(int socket) noexcept {
  std::unique_ptr<Connection> made;
  Credentials other;
  begin_call();
  try {
    if (peer_of(socket, &other) == FRUGAL_OK && other.uid == geteuid())
      made.reset(new Connection(*this, socket, other.pid));
  } catch (const std::bad_alloc&) {
  }
  if (!made) return ForkedDescriptors::close(socket);
  for (;;) {
    std::unique_ptr<Connection> oldest;  // its threads are joined without the lock
    Lock lock(mutex);
    if (stopping.load()) return;
    const auto waits = [](const auto& c) { return !c->attached(); };
    const auto waiting = std::count_if(connections.begin(), connections.end(), waits);
    if (connections.size() < limits.connections && static_cast<size_t>(waiting) < kNotAttached) {
      try {
        connections.push_back(std::move(made));
        if (!connections.back()->hire()) connections.pop_back();
      } catch (const std::bad_alloc&) {
      }
      return;
    }
    auto at = connections.end();
    long most = 0;
    for (auto c = connections.begin(); c != connections.end(); ++c) {
      if (!waits(*c)) continue;
      const auto same = [&](const auto& other) {
        return waits(other) && other->pid() == (*c)->pid();
      };
      const auto n = std::count_if(connections.begin(), connections.end(), same);
      if (n > most) {
        most = n;
        at = c;
      }
    }
    if (at == connections.end()) return;  // all connections have attached
    oldest = std::move(*at);
    connections.erase(at);
    oldest->given_up = true;
    fewer.notify_all();
    oldest->end();
  }
}

void ControlServer::Impl::reap() noexcept {
  for (;;) {
    std::unique_ptr<Connection> one;
    Lock lock(mutex);
    const auto at = std::find_if(connections.begin(), connections.end(),
                                 [](const auto& c) { return c->ended(); });
    if (at == connections.end()) return;
    one = std::move(*at);
    connections.erase(at);
  }
}

Status ControlServer::Impl::attach(Connection& connection, uint32_t version) {
  if (version != kControlVersion)
    return fail(
        FRUGAL_ERR_UNSUPPORTED,
        "this process speaks version %u of the control protocol, the controller version %u; "
        "both must be of the same build",
        version, kControlVersion);
  // Without this bound one process could take all connections. (The system gives no number for a
  // process in another PID namespace.)
  UniqueLock lock(mutex);
  size_t there = 0;
  const auto decided = [&]() REQUIRES(mutex) {
    bool leaving = false;
    there = attached_of(connection.pid(), &leaving);
    return stopping.load() || connection.given_up || there < limits.of_process || !leaving;
  };
  // Connections that the process has just closed do not count: their end is awaited.
  if (connection.pid() != 0) (void)fewer.wait_until(lock, connection.attach_by(), decided);
  if (stopping.load() || connection.given_up) return frugal::stopping();
  if (there >= limits.of_process)
    return fail(FRUGAL_ERR_BUSY,
                "process %d has %zu engines of this controller open, and the controller takes no "
                "more of one: close "
                "those that are not used",
                static_cast<int>(connection.pid()), there);
  return connection.attach();
}

// Connections of the process that have attached. `leaving`: it has closed some of them.
size_t ControlServer::Impl::attached_of(pid_t pid, bool* leaving) const {
  size_t n = 0;
  for (const auto& c : connections) {
    if (c->pid() != pid || !c->attached() || c->ended()) continue;
    ++n;
    *leaving |= c->hung_up();
  }
  return n;
}

Status ControlServer::start(const char* address, ControlHandler* handler,
                            std::unique_ptr<ControlServer>* out, const ControlLimits& limits) {
  out->reset();
  try {
    std::unique_ptr<Impl> impl(new Impl);
    std::unique_ptr<ControlServer> server(new ControlServer(nullptr));
    impl->handler = handler;
    impl->limits = limits;
    impl->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    impl->end = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (impl->bell < 0 || impl->end < 0) return os_no_descriptor(errno, "the controller's events");
    if (address) FRUGAL_TRY(impl->address.take(address));
    impl->spare = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    impl->thread = quiet_thread([its = impl.get()] { its->run(); });
    server->impl_ = impl.release();
    *out = std::move(server);
    return FRUGAL_OK;
  } catch (const std::exception&) {
    return no_thread("the control server");
  }
}

void ControlServer::stop() {
  if (!impl_ || impl_->generation != process_generation()) return;
  Lock lock(impl_->stop_mutex);
  if (impl_->stopped) return;
  impl_->stopped = true;
  {
    Lock nobody_comes(impl_->mutex);
    impl_->stopping.store(true);
    impl_->fewer.notify_all();
  }
  eventfd_write(impl_->end, 1);
  impl_->thread.join();
  impl_->address.leave();
}

ControlServer::~ControlServer() {
  // In a forked child there is no thread to wait for. What it inherited is left as it is.
  if (!impl_ || impl_->generation != process_generation()) return;
  stop();
  delete impl_;
}

void ControlServer::adopt(int socket) {
  const int mine = ForkedDescriptors::open([&] {
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    return fcntl(socket, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  });
  close(socket);
  if (mine >= 0) impl_->add(mine);
}

size_t ControlServer::connections() const {
  Lock lock(impl_->mutex);
  return impl_->connections.size();
}

}  // namespace frugal
