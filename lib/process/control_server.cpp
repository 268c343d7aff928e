// The controller's side: one thread with the event loop and all sockets, and some threads for each
// connection that make the handler's calls. What a call was asked and what it answers crosses between
// them as plain structs; Cap'n Proto's objects stay in the loop's thread.
#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/handles.h"
#include "process/control.h"
#include "process/control_limits.h"
#include "process/control_socket.h"
#include "process/control_structs.h"
#include "process/forked.h"
#include "process/kj_port.h"
#include "process/thread.h"

namespace frugal {
namespace {

constexpr size_t kThreadsOfPeer = 8;       // calls of one connection that are made at once
constexpr size_t kCallsOfPeer = 256;       // and that wait
constexpr size_t kDescriptorsOfPeer = 1024;  // sent, and not let go of by the peer

// How a call ended, with this thread's message. Wants no memory: it may tell that there is none.
struct Ending {
  Status status = FRUGAL_OK;
  int system_code = 0;
  int device_code = 0;
  char message[512] = "";
};

Ending ending_of(Status status) {
  Ending out;
  if (end_call(status) == FRUGAL_OK) return out;
  frugal_error error;
  last_error(&error);
  out.status = status;
  out.system_code = error.system_code;
  out.device_code = error.device_code;
  std::snprintf(out.message, sizeof out.message, "%s", error.message);
  return out;
}

Status stopping() { return fail(FRUGAL_ERR_CLOSED, "the controller is stopping"); }

// A call on its way through the handler. Made and let go of by the loop's thread.
struct Job : KjPort::Work {
  virtual ~Job() = default;
  virtual Status make(ControlHandler& handler, Peer& peer) = 0;
  // Made: it goes back to the loop, which must not need memory.
  static void post(std::shared_ptr<Job> job, KjPort& port) {
    Job& posted = *job;
    posted.self = std::move(job);
    port.post(posted);
  }
  void run() override {
    const std::shared_ptr<Job> mine = std::move(self);
    done->fulfill();
  }
  void drop() override { self.reset(); }
  Ending ending;
  kj::Own<kj::PromiseFulfiller<void>> done;
  std::shared_ptr<Job> self;  // while it is posted
};
using JobRef = std::shared_ptr<Job>;

// The threads of one peer.
class Crew : public HeapObject {
 public:
  Crew(KjPort& port, ControlHandler& handler, const Peer& peer, std::function<void(Crew*)> ended)
      : port_(port), handler_(handler), peer_(peer), ended_(std::move(ended)) {}
  ~Crew() {
    for (std::thread& t : threads_) t.join();
    if (peer_.pidfd >= 0) close(peer_.pidfd);
  }

  Status start() {
    std::lock_guard<std::mutex> lock(mutex_);
    return hire();
  }

  Status push(JobRef job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ending_) return stopping();
    if (queue_.size() == kCallsOfPeer)
      return fail(FRUGAL_ERR_BUSY, "%zu calls of this process wait for the controller already",
                  kCallsOfPeer);
    queue_.push_back(std::move(job));
    // A thread that cannot be had is done without: the first is there.
    if (queue_.size() > idle_ && threads_.size() < kThreadsOfPeer) (void)hire();
    work_.notify_one();
    return FRUGAL_OK;
  }

  // No call begins any more; when those under way have come back, the handler is told and ended() called.
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    work_.notify_all();
  }

 private:
  Status hire() {
    try {
      threads_.reserve(kThreadsOfPeer);
      threads_.push_back(quiet_thread([this] { body(); }));
      return FRUGAL_OK;
    } catch (const std::exception&) {
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "the controller cannot start a thread for this process");
    }
  }

  void body() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (!queue_.empty()) {
        JobRef job = std::move(queue_.front());
        queue_.pop_front();
        const bool late = ending_;
        lock.unlock();
        make(*job, late);
        Job::post(std::move(job), port_);
        lock.lock();
      } else if (ending_) {
        break;
      } else {
        ++idle_;
        work_.wait(lock);
        --idle_;
      }
    }
    if (++ended_threads_ != threads_.size()) return;
    lock.unlock();
    insist([&] { handler_.gone(peer_); });
    port_.post(last_);
  }

  void make(Job& job, bool late) {
    try {
      begin_call();
      job.ending = ending_of(late ? stopping() : job.make(handler_, peer_));
    } catch (const std::bad_alloc&) {
      job.ending = ending_of(fail(FRUGAL_ERR_OUT_OF_MEMORY, "the controller has no memory for the call"));
    } catch (...) {
      job.ending = ending_of(fail(FRUGAL_ERR_INTERNAL, "an exception in the controller"));
    }
  }

  struct Last final : KjPort::Work {
    explicit Last(Crew& c) : crew(c) {}
    void run() override { crew.ended_(&crew); }  // which waits for the thread that has posted it
    Crew& crew;
  };

  KjPort& port_;
  ControlHandler& handler_;
  Peer peer_;
  Last last_{*this};
  std::function<void(Crew*)> ended_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<JobRef, HeapAllocator<JobRef>> queue_;
  Vector<std::thread> threads_;
  size_t idle_ = 0;
  size_t ended_threads_ = 0;
  bool ending_ = false;
};

// What the objects that a peer holds know of it. They may outlive the connection by a moment.
struct PeerState {
  ControlServer::Impl* server;
  Peer peer;  // its pidfd is the connection's
  Crew* crew = nullptr;  // null: not attached, or ended
  size_t descriptors = 0;
};
using PeerRef = std::shared_ptr<PeerState>;

class DescriptorImpl final : public wire::Descriptor::Server {
 public:
  DescriptorImpl(PeerRef peer, int fd) : peer_(std::move(peer)), fd_(fd) { ++peer_->descriptors; }
  ~DescriptorImpl() noexcept(false) {
    --peer_->descriptors;
    close(fd_);
  }
  kj::Maybe<int> getFd() override { return fd_; }

 private:
  PeerRef peer_;
  int fd_;
};

// A descriptor of the same for another process; -1 and errno: none can be had. Without `writable` nothing can be
// written through it, where the system has /proc.
int duplicate(int fd, bool writable) {
  if (!writable) {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int opened = ::open(path, O_RDONLY | O_CLOEXEC);
    if (opened >= 3) return opened;
    if (opened >= 0) {  // a program that has closed its standard descriptors
      const int moved = fcntl(opened, F_DUPFD_CLOEXEC, 3);
      const int code = errno;
      close(opened);
      errno = code;
      return moved;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) return -1;
  }
  return fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

// Duplicates of a handler's descriptors, closed unless they go into an answer.
struct Duplicates {
  Vector<int> fds;
  ~Duplicates() {
    for (int fd : fds) close(fd);
  }
  template <class Reply>
  Status take(const Reply& reply) {
    const Vector<int>&from = reply.descriptors, &read_only = reply.read_only;
    const Vector<uint64_t>& numbers = reply.numbers;
    if (from.size() > kMostDescriptors || numbers.size() > kMostNumbers)
      return fail(FRUGAL_ERR_INTERNAL, "an answer with %zu descriptors and %zu numbers is too large",
                  from.size(), numbers.size());
    fds.reserve(from.size());
    for (int fd : from) {
      const bool writable = std::find(read_only.begin(), read_only.end(), fd) == read_only.end();
      const int copy = duplicate(fd, writable);
      if (copy < 0)
        return fail_errno(errno == EBADF ? FRUGAL_ERR_INTERNAL : FRUGAL_ERR_OUT_OF_MEMORY, errno,
                          "the controller cannot duplicate a descriptor");
      fds.push_back(copy);
    }
    return FRUGAL_OK;
  }
};

void put_error(const Ending& from, wire::Error::Builder to) {
  to.setStatus(from.status);
  to.setSystemCode(from.system_code);
  to.setDeviceCode(from.device_code);
  to.setMessage(from.message);
}

class SessionImpl final : public wire::Session::Server {
 public:
  explicit SessionImpl(PeerRef peer) : peer_(std::move(peer)) {}

 protected:
  kj::Promise<void> ping(PingContext) override { return kj::READY_NOW; }

  kj::Promise<void> open(OpenContext context) override {
    struct Open final : Job {
      frugal_config config;
      OpenReply reply;
      Duplicates given;
      Status make(ControlHandler& handler, Peer& peer) override {
        FRUGAL_TRY(handler.open(peer, config, &reply));
        return given.take(reply);
      }
    };
    auto job = std::make_shared<Open>();
    take(context.getParams().getConfig(), &job->config);
    frugal_config_init(&job->reply.config);
    return make(context, job, [this](Open& job, auto results) {
      put(job.reply.config, results.initConfig());
      give(job.given, job.reply.numbers, results.initGiven());
    });
  }

  kj::Promise<void> createTable(CreateTableContext context) override {
    struct Create final : TableJob {
      String name;
      frugal_table_config config;
      Status answer(ControlHandler& handler, Peer& peer) override {
        return handler.create_table(peer, config, &reply);
      }
    };
    auto job = std::make_shared<Create>();
    take(context.getParams().getConfig(), &job->config);
    if (job->config.name) {
      job->name = job->config.name;
      job->config.name = job->name.c_str();
    }
    return make(context, job, [this](TableJob& job, auto results) { put_table(job, results.initTable()); });
  }

  kj::Promise<void> findTable(FindTableContext context) override {
    struct Find final : TableJob {
      String name;
      Status answer(ControlHandler& handler, Peer& peer) override {
        return handler.find_table(peer, name.c_str(), &reply);
      }
    };
    auto job = std::make_shared<Find>();
    job->name = context.getParams().getName().cStr();
    return make(context, job, [this](TableJob& job, auto results) { put_table(job, results.initTable()); });
  }

  kj::Promise<void> dropTable(DropTableContext context) override {
    struct Drop final : Job {
      uint64_t id;
      Status make(ControlHandler& handler, Peer& peer) override { return handler.drop_table(peer, id); }
    };
    auto job = std::make_shared<Drop>();
    job->id = context.getParams().getId();
    return make(context, job, [](Drop&, auto) {});
  }

  kj::Promise<void> join(JoinContext context) override {
    struct Join final : Job {
      String device;
      frugal_trainer_config config;
      JoinReply reply;
      Duplicates given;
      Status make(ControlHandler& handler, Peer& peer) override {
        FRUGAL_TRY(handler.join(peer, config, &reply));
        const Status s = given.take(reply);
        if (s == FRUGAL_OK) return s;
        // Nobody will hear that it has joined.
        end_call(s);
        frugal_error why;
        last_error(&why);
        const uint64_t joined = reply.numbers.empty() ? kAnyJoin : reply.numbers[0];
        reply = {};
        (void)handler.leave(peer, config.rank, true, joined);
        return fail_as(why);
      }
    };
    auto job = std::make_shared<Join>();
    take(context.getParams().getConfig(), &job->config);
    if (job->config.device) {
      job->device = job->config.device;
      job->config.device = job->device.c_str();
    }
    return make(context, job, [this](Join& job, auto results) {
      give(job.given, job.reply.numbers, results.initGiven());
    });
  }

  kj::Promise<void> leave(LeaveContext context) override {
    struct Leave final : Job {
      uint32_t rank;
      bool lost;
      uint64_t joined;
      Status make(ControlHandler& handler, Peer& peer) override { return handler.leave(peer, rank, lost, joined); }
    };
    auto job = std::make_shared<Leave>();
    job->rank = context.getParams().getRank();
    job->lost = context.getParams().getLost();
    job->joined = context.getParams().getJoined();
    return make(context, job, [](Leave&, auto) {});
  }

  kj::Promise<void> stats(StatsContext context) override {
    struct Stats final : Job {
      frugal_stats stats{};
      Status make(ControlHandler& handler, Peer& peer) override { return handler.stats(peer, &stats); }
    };
    auto job = std::make_shared<Stats>();
    job->stats.struct_size = sizeof job->stats;
    return make(context, job, [](Stats& job, auto results) { put(job.stats, results.initStats()); });
  }

  kj::Promise<void> health(HealthContext context) override {
    struct Health final : Job {
      int32_t health = 0;
      Status make(ControlHandler& handler, Peer& peer) override { return handler.health(peer, &health); }
    };
    return make(context, std::make_shared<Health>(),
                [](Health& job, auto results) { results.setHealth(job.health); });
  }

  kj::Promise<void> committed(CommittedContext context) override {
    struct Committed final : Job {
      uint64_t step = FRUGAL_NO_STEP;
      Status make(ControlHandler& handler, Peer& peer) override {
        return handler.committed(peer, &step);
      }
    };
    return make(context, std::make_shared<Committed>(),
                [](Committed& job, auto results) { results.setStep(job.step); });
  }

 private:
  struct TableJob : Job {
    TableReply reply;
    Duplicates given;
    TableJob() {
      reply.info = {};
      reply.info.struct_size = sizeof reply.info;
    }
    virtual Status answer(ControlHandler& handler, Peer& peer) = 0;
    Status make(ControlHandler& handler, Peer& peer) override {
      FRUGAL_TRY(answer(handler, peer));
      return given.take(reply);
    }
  };

  // Lets a thread of the peer run the job, and writes the answer when it has. The call is dropped when
  // the connection ends; the job is run to its end all the same.
  template <class Context, class Made, class Fill>
  kj::Promise<void> make(Context context, std::shared_ptr<Made> job, Fill fill) {
    context.releaseParams();
    context.allowCancellation();
    auto paf = kj::newPromiseAndFulfiller<void>();
    job->done = kj::mv(paf.fulfiller);
    begin_call();
    const Status s = peer_->crew ? peer_->crew->push(job) : stopping();
    if (s != FRUGAL_OK) {
      put_error(ending_of(s), context.getResults().initError());
      return kj::READY_NOW;
    }
    return paf.promise.then([context, job, fill]() mutable {
      auto results = context.getResults();
      put_error(job->ending, results.initError());
      if (job->ending.status == FRUGAL_OK) fill(*job, results);
    });
  }

  void give(Duplicates& from, const Vector<uint64_t>& numbers, wire::Given::Builder to) {
    KJ_REQUIRE(peer_->descriptors + from.fds.size() <= kDescriptorsOfPeer,
               "descriptors that were sent are not let go of");
    auto descriptors = to.initDescriptors(static_cast<capnp::uint>(from.fds.size()));
    capnp::uint i = 0;
    for (int& fd : from.fds) {
      descriptors.set(i++, kj::heap<DescriptorImpl>(peer_, fd));
      fd = -1;
    }
    from.fds.clear();
    auto out = to.initNumbers(static_cast<capnp::uint>(numbers.size()));
    for (capnp::uint n = 0; n < out.size(); ++n) out.set(n, numbers[n]);
  }

  void put_table(TableJob& job, wire::Table::Builder to) {
    to.setId(job.reply.id);
    put(job.reply.info, to.initInfo());
    give(job.given, job.reply.numbers, to.initGiven());
  }

  PeerRef peer_;
};

class ControlImpl final : public wire::Control::Server {
 public:
  explicit ControlImpl(PeerRef peer) : peer_(std::move(peer)) {}

 protected:
  kj::Promise<void> attach(AttachContext context) override;

 private:
  PeerRef peer_;
};

class Connection {
 public:
  Connection(KjPort& port, int socket, PeerRef peer)
      : peer_(std::move(peer)),
        messages_(port, socket, kMostMessageWords, false, true),
        network_(messages_, kMostDescriptors, capnp::rpc::twoparty::Side::SERVER, reader_options()),
        rpc_(capnp::makeRpcServer(network_, kj::heap<ControlImpl>(peer_))) {
    rpc_.setFlowLimit(kMostCallWords);
    // The process is dead, whoever else may hold the socket: what it has sent is still read.
    if (peer_->peer.pidfd >= 0)
      watch_ = port.ready(peer_->peer.pidfd, POLLIN)
                   .then([this] { shutdown(messages_.socket(), SHUT_RDWR); })
                   .eagerlyEvaluate(nullptr);
  }
  ~Connection() noexcept(false);

  kj::Promise<void> ended() { return network_.onDisconnect(); }

 private:
  PeerRef peer_;
  SocketMessages messages_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  kj::Promise<void> watch_ = nullptr;
};

}  // namespace

struct ControlServer::Impl final : HeapObject, kj::TaskSet::ErrorHandler {
  ControlHandler* handler = nullptr;
  size_t most_connections = 0;
  uint32_t generation = process_generation();
  ControlPlace place;
  int spare = -1;  // given up for a moment when there are no descriptors to accept with
  std::thread thread;
  KjPort port;
  std::atomic<size_t> connections{0};
  std::mutex stop_mutex;
  bool stopped = false;

  struct Stop final : KjPort::Work {
    explicit Stop(Impl& i) : impl(i) {}
    void run() override { impl.begin_stop(); }
    Impl& impl;
  } stop_work{*this};

  // Of the loop's thread.
  bool stopping = false;
  uint64_t next_id = 1;
  Vector<Crew*> crews;
  kj::Own<kj::PromiseFulfiller<void>> finished;
  kj::TaskSet* tasks = nullptr;

  void run() {
    Quiet quiet;
    kj::EventLoop loop(port);
    kj::WaitScope scope(loop);
    {
      kj::TaskSet all(*this);
      tasks = &all;
      auto paf = kj::newPromiseAndFulfiller<void>();
      finished = kj::mv(paf.fulfiller);
      if (place.listener() >= 0) all.add(accept());
      if (stopping) finish_if_idle();
      try {
        paf.promise.wait(scope);
        // The last answers go out, as far as their readers take them at once.
        while (loop.isRunnable()) {
          loop.run();
          port.poll();
        }
      } catch (...) {
      }
    }
    tasks = nullptr;
  }

  void taskFailed(kj::Exception&&) override {}  // a connection's end

  kj::Promise<void> accept() {
    return port.ready(place.listener(), POLLIN).then([this]() -> kj::Promise<void> {
      if (stopping) return kj::READY_NOW;
      bool taken = false;
      try {
        taken = accept_some();
      } catch (...) {  // no memory for that one
      }
      if (taken) return accept();
      return port.after(100000000).then([this] { return accept(); });
    }).catch_([this](kj::Exception&&) { return port.after(100000000).then([this] { return accept(); }); });
  }

  // False: there is nothing to take a connection with.
  bool accept_some() {
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

  int accept_one() {
    return ForkedDescriptors::open([&] {
      return accept4(place.listener(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    });
  }

  void add(int socket) {
    Credentials other;
    begin_call();
    if (stopping || connections.load() >= most_connections || peer_of(socket, &other) != FRUGAL_OK ||
        other.uid != geteuid()) {
      ForkedDescriptors::close(socket);
      return;
    }
    auto peer = std::make_shared<PeerState>();
    peer->server = this;
    peer->peer = {other.pid, pidfd_of(socket, other.pid), next_id++};
    ++connections;
    auto connection = kj::heap<Connection>(port, socket, kj::mv(peer));
    auto ended = connection->ended();
    tasks->add(ended.attach(kj::mv(connection)));
  }

  Status attach(const PeerRef& state, uint32_t version) {
    PeerState& peer = *state;
    if (version != kControlVersion)
      return fail(FRUGAL_ERR_UNSUPPORTED,
                  "this process speaks version %u of the control protocol, the controller version %u; "
                  "both must be of the same build",
                  version, kControlVersion);
    if (stopping) return frugal::stopping();
    if (peer.crew) return fail(FRUGAL_ERR_EXISTS, "the connection is attached already");
    Peer its = peer.peer;
    its.pidfd = its.pidfd >= 0 ? fcntl(its.pidfd, F_DUPFD_CLOEXEC, 3) : -1;
    std::unique_ptr<Crew> crew(new Crew(port, *handler, its, [this, state](Crew* c) {
      if (state->crew == c) state->crew = nullptr;
      drop(c);
    }));
    crews.reserve(crews.size() + 1);
    FRUGAL_TRY(crew->start());
    crews.push_back(crew.get());
    peer.crew = crew.release();
    return FRUGAL_OK;
  }

  void drop(Crew* crew) {
    crews.erase(std::find(crews.begin(), crews.end(), crew));
    delete crew;
    finish_if_idle();
  }

  void finish_if_idle() {
    if (stopping && crews.empty() && finished) finished->fulfill();
  }

  void begin_stop() {
    stopping = true;
    for (Crew* c : crews) c->end();
    finish_if_idle();
  }
};

namespace {

kj::Promise<void> ControlImpl::attach(AttachContext context) {
  begin_call();
  const Status s = peer_->server->attach(peer_, context.getParams().getVersion());
  auto results = context.getResults();
  put_error(ending_of(s), results.initError());
  if (s == FRUGAL_OK) results.setSession(kj::heap<SessionImpl>(peer_));
  return kj::READY_NOW;
}

Connection::~Connection() noexcept(false) {
  watch_ = nullptr;
  if (peer_->crew) peer_->crew->end();
  peer_->crew = nullptr;
  if (peer_->peer.pidfd >= 0) close(peer_->peer.pidfd);
  peer_->peer.pidfd = -1;
  --peer_->server->connections;
}

}  // namespace

Status ControlServer::start(const char* address, ControlHandler* handler,
                            std::unique_ptr<ControlServer>* out, size_t connections) {
  out->reset();
  try {
    std::unique_ptr<Impl> impl(new Impl);
    impl->handler = handler;
    impl->most_connections = connections;
    FRUGAL_TRY(impl->port.open());
    if (address) FRUGAL_TRY(impl->place.take(address));
    impl->spare = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    Impl* running = impl.get();
    std::unique_ptr<ControlServer> server(new ControlServer(running));
    try {
      { Quiet once; }  // what kj keeps is made here: a child of a fork might find it half made
      running->thread = quiet_thread([running] { running->run(); });
    } catch (...) {
      server->impl_ = nullptr;
      if (running->spare >= 0) close(running->spare);
      throw;
    }
    impl.release();
    *out = std::move(server);
    return FRUGAL_OK;
  } catch (const std::exception&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "the control server cannot be started: no memory or no thread");
  }
}

void ControlServer::stop() {
  if (!impl_ || impl_->generation != process_generation()) return;
  std::lock_guard<std::mutex> lock(impl_->stop_mutex);
  if (impl_->stopped) return;
  impl_->stopped = true;
  Impl* impl = impl_;
  impl->port.post(impl->stop_work);
  impl->thread.join();
  impl->place.leave();
  if (impl->spare >= 0) close(impl->spare);
  impl->spare = -1;
}

ControlServer::~ControlServer() {
  // In a forked child there is no thread to wait for: what it left is let be.
  if (!impl_ || impl_->generation != process_generation()) return;
  stop();
  delete impl_;
}

void ControlServer::adopt(int socket) {
  int mine = ForkedDescriptors::open([&] {
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    return fcntl(socket, F_DUPFD_CLOEXEC, 3);
  });
  close(socket);
  if (mine < 0) return;
  std::lock_guard<std::mutex> lock(impl_->stop_mutex);
  if (impl_->stopped) {
    ForkedDescriptors::close(mine);
    return;
  }
  Impl* impl = impl_;
  try {
    impl->port.post([impl, mine] {
      if (impl->tasks) impl->add(mine);
      else ForkedDescriptors::close(mine);
    });
  } catch (const std::bad_alloc&) {
    ForkedDescriptors::close(mine);
  }
}

size_t ControlServer::connections() const { return impl_->connections.load(); }

}  // namespace frugal
