#include "process/server.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "base/condition.h"
#include "base/handles.h"
#include "base/retry.h"
#include "engine/config_check.h"
#include "process/attached.h"
#include "process/descriptors.h"
#include "process/reaper.h"
#include "process/watch.h"

namespace frugal {
namespace {

// Of a trainer. A message of a quarter of it, such as a declaration of 100,000 keys, is sent
// without waiting.
constexpr size_t kRingBytes = size_t{4} << 20;
// A ring is committed whole, and a process may have many engines open. So calls outside steps have
// small rings if the process observes, or has too many large ones (LargeRings).
constexpr size_t kSmallRingBytes = size_t{128} << 10;
// Addresses only: memory is taken as it is used.
constexpr size_t kStagingBytes = size_t{64} << 30;
constexpr size_t kAllStagingBytes = size_t{16} << 40;
// Trainers that a process has lost and not closed: each keeps its channel.
constexpr size_t kMostReplaced = 16;

}  // namespace

struct Server::Impl final : ControlHandler, RequestLoopOwner, Reaper::Owner {
  Mutex mu_;
  std::shared_ptr<Engine> engine_;  // null: no process has opened it yet
  uint64_t engine_handle_ = 0;
  bool own_engine_ = false;
  frugal_log_fn log_ = nullptr;  // of its own engine
  LargeRings large_rings_;
  Map<uint64_t, std::shared_ptr<Attached>> processes_ GUARDED_BY(mu_);  // by peer
  Vector<uint32_t> leaving_ GUARDED_BY(mu_);  // by rank: request loops that are being lost
  struct Joining {
    uint32_t rank;
    const Attached* process;
    uint64_t request;
    bool given_up = false;  // its process does not wait for it any more
    bool ends() const { return given_up || process->gone || has_ended(*process); }
  };
  Vector<Joining*> joining_ GUARDED_BY(mu_);  // calls of join under way, the oldest first
  Condition left_;
  std::unique_ptr<Watch> watch_;
  std::unique_ptr<ControlServer> control_;
  Reaper reaper_{*this};
  std::atomic<bool> ending_{false};  // no thread waits for memory any more

  void listen() {
    reaper_.reserve(engine_->config().world_size);
    engine_->on_unresponsive([this](const TrainerRef& t) { reaper_.lose_async(t); });
  }
  void reap(const TrainerRef& trainer) override {
    retry_for_memory([&] { take_over(trainer->rank, trainer.get()); });
  }
  void reaped() override {
    Lock waiters(mu_);
    left_.notify_all();
  }
  // A process that breaks the protocol loses the rank; outside of steps, all of its ranks.
  void broken(uint64_t peer, const TrainerRef& trainer) noexcept override {
    retry_for_memory([&] {
      Lock lock(mu_);
      auto at = processes_.find(peer);
      if (at == processes_.end()) return;
      for (auto& request_loop : at->second->trainers)
        if (!trainer || request_loop->trainer() == trainer)
          reaper_.lose_async(request_loop->trainer());
    });
  }
  void stop_reaper() {
    if (engine_) engine_->on_unresponsive(nullptr);
    reaper_.stop();
  }

  std::shared_ptr<Attached> process_of(const Peer& peer) {
    Lock lock(mu_);
    auto at = processes_.find(peer.id);
    return at == processes_.end() || at->second->gone ? nullptr : at->second;
  }
  Status attached(const Peer& peer, std::shared_ptr<Attached>* out) {
    *out = process_of(peer);
    return *out ? FRUGAL_OK
                : fail(FRUGAL_ERR_NOT_IN_STEP, "no engine was opened by this connection");
  }

  // The same, of a process that does not only observe.
  Status taking_part(const Peer& peer, std::shared_ptr<Attached>* out) {
    FRUGAL_TRY(attached(peer, out));
    return (*out)->observes ? fail(FRUGAL_ERR_UNSUPPORTED,
                                   "this process has attached with FRUGAL_OBSERVE, which only "
                                   "observes: open without it to change the engine")
                            : FRUGAL_OK;
  }

  // The first process decides the engine's configuration; the others must ask for the same.
  Status same_engine(const frugal_config& asked) {
    const frugal_config& c = engine_->config();
    auto differs = [](const char* what, unsigned long long a, unsigned long long b) {
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "the controller's engine has %s %llu, this process asks for %llu: all must ask "
                  "for the same",
                  what, a, b);
    };
    if (c.world_size != asked.world_size)
      return differs("world_size", c.world_size, asked.world_size);
    if (c.lookahead != asked.lookahead) return differs("lookahead", c.lookahead, asked.lookahead);
    const uint64_t staleness = asked.staleness == FRUGAL_STALENESS_ASYNC
                                   ? asked.staleness
                                   : std::min<uint64_t>(asked.staleness, Window::kHorizon - 2);
    if (c.staleness != staleness) return differs("staleness", c.staleness, staleness);
    if (c.seed != asked.seed) return differs("seed", c.seed, asked.seed);
    return FRUGAL_OK;
  }

  Status open_engine(const frugal_config& asked) {
    Lock lock(mu_);
    if (asked.flags & FRUGAL_OBSERVE)
      return engine_ ? FRUGAL_OK
                     : fail(FRUGAL_ERR_NOT_FOUND,
                            "there is no engine to observe: open one without FRUGAL_OBSERVE first");
    if (engine_) return same_engine(asked);
    frugal_config c = asked;
    c.backing = FRUGAL_BACKING_SHM;
    c.log = log_;
    c.log_context = nullptr;
    c.service = nullptr;
    FRUGAL_TRY(check_config(c));
    auto engine = std::allocate_shared<Engine>(HeapAllocator<Engine>(), c);
    FRUGAL_TRY(engine->start());
    FRUGAL_TRY(make_readable(*engine));
    engine_ = std::move(engine);
    own_engine_ = true;
    listen();
    return FRUGAL_OK;
  }

  // Sets up what other processes need to read the tables out when this one has been killed.
  Status make_readable(Engine& engine) REQUIRES(mu_) {
    FRUGAL_TRY(engine.keep_ledger());
    leaving_.assign(engine.config().world_size, 0);
    return FRUGAL_OK;
  }

  // `staging`: of a trainer; or null. The reply keeps the channel alive: the process may end, and
  // its request loops with it, before the descriptors are sent.
  template <class Reply>
  static Status channel(size_t ring, std::shared_ptr<StagingMemory> staging, Reply* reply,
                        std::shared_ptr<Channel>* out) {
    const bool staged = staging != nullptr;
    std::unique_ptr<Channel> c;
    FRUGAL_TRY(Channel::create(ring, std::move(staging), &c));
    std::shared_ptr<Channel> shared(std::move(c));
    reply->descriptors.push_back(shared->up_fd());
    reply->descriptors.push_back(shared->down_fd());
    reply->read_only.push_back(shared->down_fd());
    if (staged) reply->descriptors.push_back(shared->staging_fd());
    reply->keep = shared;
    *out = std::move(shared);
    return FRUGAL_OK;
  }

  Status open(Peer& peer, const frugal_config& config, OpenReply* reply) override {
    if (process_of(peer))
      return fail(FRUGAL_ERR_EXISTS, "this connection has opened the engine already");
    FRUGAL_TRY(open_engine(config));
    auto process = std::allocate_shared<Attached>(HeapAllocator<Attached>(), engine_, large_rings_,
                                                  peer.pid, (config.flags & FRUGAL_OBSERVE) != 0);
    auto ends = std::allocate_shared<Ends>(HeapAllocator<Ends>());
    FRUGAL_TRY(ends->open(peer.socket));
    FRUGAL_TRY(engine_->arena().region_publisher()->add(ends->sockets[0], ends->connection,
                                                        &process->told));
    ends->sockets[0] = ends->connection = -1;
    reply->descriptors.push_back(ends->sockets[1]);
    std::shared_ptr<Channel> shared;
    FRUGAL_TRY(channel(process->large ? kRingBytes : kSmallRingBytes, nullptr, reply, &shared));
    process->calls.reset(
        new ProcessRequestLoop(engine_, std::move(shared), process->observes, this, peer.id));
    FRUGAL_TRY(process->calls->start());
    reply->numbers.push_back(process->calls->joined());
    ends->keep = std::move(reply->keep);
    reply->keep = std::move(ends);
    reply->numbers.push_back(engine_->versions_address());
    reply->numbers.push_back(engine_->ledger()->shm_address());
    reply->config = engine_->config();
    struct Descriptor {
      int fd = -1;
      ~Descriptor() {
        if (fd >= 0) close(fd);
      }
    } watched;
    if (peer.pidfd >= 0) {
      process->pidfd = fcntl(peer.pidfd, F_DUPFD_CLOEXEC, 3);
      watched.fd = fcntl(peer.pidfd, F_DUPFD_CLOEXEC, 3);
      if (process->pidfd < 0 || watched.fd < 0)
        return os_no_descriptor(errno, "the controller's watch of this process");
    }
    Lock lock(mu_);
    if (!processes_.emplace(peer.id, process).second)
      return fail(FRUGAL_ERR_EXISTS, "this connection has opened the engine already");
    // Without a pidfd the process counts as ended when its connection ends.
    if (watched.fd < 0) return FRUGAL_OK;
    const uint64_t id = peer.id;
    Status s = watch_->add(
        watched.fd, [this, id] { ended(id, true); }, &process->watched);
    if (s == FRUGAL_OK)
      watched.fd = -1;
    else
      processes_.erase(id);
    return s;
  }

  // The descriptors of a table as it is: it may have other state before they are sent.
  struct Described {
    TableRef table;
    Vector<int> copies;
    Descriptors closes{copies};
  };

  Status describe(const TableRef& t, TableReply* reply) {
    auto described = std::allocate_shared<Described>(HeapAllocator<Described>());
    described->table = t;
    reply->id = t->handle;
    Lock lock(t->kind_mu);
    FRUGAL_TRY(engine_->describe(*t, &reply->info));
    Vector<int> own;
    const uint32_t arrays = t->rows.mappings(&own);
    described->copies.reserve(own.size());
    for (int fd : own) {
      const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
      if (copy < 0) return os_no_descriptor(errno, "the memory of a table");
      described->copies.push_back(copy);
    }
    reply->descriptors = described->copies;
    reply->read_only = reply->descriptors;
    reply->numbers.push_back(static_cast<uint64_t>(static_cast<int64_t>(t->config.nan_policy)));
    reply->numbers.push_back(arrays);
    reply->numbers.push_back(t->ledger->shm_address());
    reply->numbers.push_back(t->rows.lazy());
    reply->numbers.push_back(t->kinds);
    reply->keep = std::move(described);
    return FRUGAL_OK;
  }

  Status create_table(Peer& peer, const frugal_table_config& config, TableReply* reply) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(taking_part(peer, &process));
    FRUGAL_TRY(check_name(config));
    FRUGAL_TRY(check_table(config));
    TableRef table;
    Status s = engine_->create_table(config, &table, false);
    // Each rank of a job creates its tables. A table that exists counts as created if it is the
    // same: another rank has made it, or this process has and did not receive the reply. A process
    // that has received it reports a second creation by itself.
    if (s != FRUGAL_ERR_EXISTS || !table) FRUGAL_TRY(s);
    return describe(table, reply);
  }

  Status find_table(Peer& peer, const char* name, TableReply* reply) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(attached(peer, &process));
    AnyTableRef found;
    FRUGAL_TRY(engine_->find_table(name, &found));
    const TableRef table = std::static_pointer_cast<Table>(found);
    return describe(table, reply);
  }

  Status drop_table(Peer& peer, uint64_t id) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(taking_part(peer, &process));
    TableRef table;
    FRUGAL_TRY(engine_->table_of(id, &table));
    return engine_->drop_table(table);
  }

  Status join(Peer& peer, uint64_t request, const frugal_trainer_config& config,
              JoinReply* reply) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(taking_part(peer, &process));
    FRUGAL_TRY(check_trainer(config, engine_->config().world_size));
    JoinScope joins(*this, config.rank, *process, request);
    // The trainer that it replaces may still be joining.
    if (config.flags & FRUGAL_TRAINER_REPLACE && await_rank(joins, true)) take_over(config.rank);
    if (!await_rank(joins, false)) return not_awaited();
    {
      Lock lock(mu_);
      if (process->replaced.size() >= kMostReplaced)
        return fail(FRUGAL_ERR_BUSY,
                    "this process has %zu trainers that have lost their ranks: close them first",
                    process->replaced.size());
    }
    // The request loop ends last: an abort counts in its memory while the trainer exists.
    std::unique_ptr<TrainerRequestLoop> request_loop;
    struct Joined {
      Impl& impl;
      TrainerRef trainer;
      ~Joined() {
        if (!trainer) return;
        const KeepError why;
        impl.take_out(trainer);
      }
    } joined{*this, nullptr};
    TrainerRef& trainer = joined.trainer;
    FRUGAL_TRY(engine_->create_trainer(config, &trainer, true));
    std::shared_ptr<StagingMemory> staging;
    const size_t bytes = std::min(kStagingBytes, kAllStagingBytes / engine_->config().world_size);
    FRUGAL_TRY(StagingMemory::make(bytes, engine_->arena().region_publisher(), &staging));
    std::shared_ptr<Channel> shared;
    FRUGAL_TRY(channel(kRingBytes, std::move(staging), reply, &shared));
    request_loop.reset(new TrainerRequestLoop(engine_, trainer, std::move(shared), this, peer.id));
    FRUGAL_TRY(request_loop->start());
    reply->numbers.push_back(request_loop->joined());
    reply->numbers.push_back(request_loop->notices_address());
    Lock lock(mu_);
    if (joins.ends()) return not_awaited();
    request_loop->request = request;
    process->trainers.push_back(std::move(request_loop));
    trainer = nullptr;
    return FRUGAL_OK;
  }

  static Status not_awaited() {
    return fail(FRUGAL_ERR_PEER_LOST,
                "the process no longer waits to join as this rank: join again");
  }

  // The rank is free afterwards, however long memory is short: no other thread would free it.
  void take_out(const TrainerRef& trainer) {
    handle_remove(HandleKind::kTrainer, trainer->handle);
    retry_for_memory([&] { return engine_->lose_trainer(trainer); },
                     [&](int tries) { return tries >= kForASecond && ending_.load(); });
  }

  // The request loop that has this rank, in its process's list, or null.
  std::unique_ptr<TrainerRequestLoop>* request_loop_of(Attached& process, uint32_t rank,
                                                       const Trainer* trainer = nullptr)
      REQUIRES(mu_) {
    for (auto& request_loop : process.trainers)
      if (request_loop->trainer()->rank == rank &&
          (!trainer || request_loop->trainer().get() == trainer))
        return &request_loop;
    return nullptr;
  }

  // The trainer that has the rank does not reply: it is cut off as if it had died.
  void take_over(uint32_t rank, const Trainer* trainer = nullptr) {
    std::shared_ptr<Attached> of;  // request loops end without the lock
    Lock lock(mu_);
    for (auto& [id, process] : processes_) {
      std::unique_ptr<TrainerRequestLoop>* request_loop = request_loop_of(*process, rank, trainer);
      if (!request_loop) continue;
      of = process;
      of->replaced.push_back(std::move(*request_loop));
      std::erase(of->trainers, nullptr);
      lose(*of->replaced.back());
      return;
    }
  }

  // Waits while the rank's trainer is leaving or its process has ended: then the rank is free soon.
  // With `earlier`, also waits for joins with this rank that began before `mine`. False: no caller
  // waits for `mine` any more.
  bool await_rank(const Joining& mine, bool earlier) {
    const uint32_t rank = mine.rank;
    bool ended = false;
    const auto known = [&]() REQUIRES(mu_) {
      if (mine.ends()) return ended = true;
      bool soon = leaving_[rank] > 0;
      for (auto& [id, process] : processes_)
        for (auto& request_loop : process->trainers)
          if (request_loop->trainer()->rank == rank) soon |= process->gone || has_ended(*process);
      bool before = earlier;
      for (const Joining* j : joining_) {
        if (j == &mine)
          before = false;
        else if (j->rank == rank)
          soon |= before || j->ends();
      }
      soon |= reaper_.has(rank);
      return !soon;
    };
    UniqueLock lock(mu_);
    left_.wait(lock, known);
    return !ended;
  }

  // A process that dies while it joins has the rank for a moment, and no request loop yet.
  struct JoinScope : Joining {
    JoinScope(Impl& impl, uint32_t rank, const Attached& of, uint64_t request)
        : Joining{rank, &of, request}, impl_(impl) {
      Lock lock(impl_.mu_);
      const auto at = of.given_up.find(rank);
      given_up = at != of.given_up.end() && request < at->second;
      impl_.joining_.push_back(this);
    }
    ~JoinScope() {
      Lock lock(impl_.mu_);
      std::erase(impl_.joining_, this);
      impl_.left_.notify_all();
    }
    Impl& impl_;
  };

  static bool has_ended(const Attached& process) {
    pollfd p{process.pidfd, POLLIN, 0};
    return process.pidfd >= 0 && poll(&p, 1, 0) == 1;
  }

  // While it lives, the rank's trainer is leaving. mu_, which is held before and after, is
  // released.
  class SCOPED_CAPABILITY LeavingScope {
   public:
    LeavingScope(Impl& impl, uint32_t rank) RELEASE(impl.mu_) NO_THREAD_SAFETY_ANALYSIS
        : impl_(impl),
          rank_(rank) {
      ++impl_.leaving_[rank_];
      impl_.mu_.unlock();
    }
    ~LeavingScope() RELEASE() NO_THREAD_SAFETY_ANALYSIS {
      impl_.mu_.lock();
      --impl_.leaving_[rank_];
      impl_.left_.notify_all();
    }
    LeavingScope(const LeavingScope&) = delete;
    LeavingScope& operator=(const LeavingScope&) = delete;

   private:
    Impl& impl_;
    const uint32_t rank_;
  };

  // Takes the trainer of a request loop out of the engine. Releases mu_ meanwhile.
  void lose(TrainerRequestLoop& request_loop) REQUIRES(mu_) {
    const TrainerRef trainer = request_loop.trainer();
    const LeavingScope leaving(*this, trainer->rank);
    request_loop.cut();
    request_loop.tell_lost();
    take_out(trainer);
    // Its rank gradients of committed steps are read from its memory, but not after this. If it was
    // only suspended it may go on, and write there.
    (void)retry_for_memory([&] { return engine_->flush({UINT64_MAX}); });
  }

  Status leave(Peer& peer, uint64_t request, uint32_t rank, bool lost, uint64_t joined) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(attached(peer, &process));
    // Request loops end without the lock.
    std::unique_ptr<TrainerRequestLoop> request_loop, replaced;
    UniqueLock lock(mu_);
    if (std::unique_ptr<TrainerRequestLoop>* its = request_loop_of(*process, rank); its && !lost) {
      const TrainerRef trainer = (*its)->trainer();
      lock.unlock();
      FRUGAL_TRY(engine_->may_close(*trainer));
      lock.lock();
    }
    const bool any = joined == kAnyJoin && rank < leaving_.size();
    // A join that is yet to begin: another thread has the request, and has not acted on it.
    if (any) process->given_up[rank] = std::max(process->given_up[rank], request);
    bool given_up = false;  // or one that is under way
    for (Joining* j : joining_)
      if (any && j->rank == rank && j->process == process.get() && j->request < request)
        given_up = j->given_up = true;
    if (given_up) left_.notify_all();
    // Another thread may be about to lose the request loop.
    left_.wait(lock,
               [&]() REQUIRES(mu_) { return rank >= leaving_.size() || leaving_[rank] == 0; });
    for (auto& old : process->replaced)
      if (joined != kAnyJoin && old->trainer()->rank == rank && old->joined() == joined)
        replaced = std::move(old);
    if (replaced) {  // nothing reads what it held any more
      std::erase(process->replaced, nullptr);
      return FRUGAL_OK;
    }
    if (std::unique_ptr<TrainerRequestLoop>* its = request_loop_of(*process, rank);
        its && (joined == kAnyJoin ? (*its)->request < request : (*its)->joined() == joined)) {
      request_loop = std::move(*its);
      std::erase(process->trainers, nullptr);
    }
    if (!request_loop && given_up) return FRUGAL_OK;
    if (!request_loop)
      return fail(FRUGAL_ERR_NOT_FOUND, "this process has no trainer of rank %u", rank);
    if (lost) {
      lose(*request_loop);
      return FRUGAL_OK;
    }
    const LeavingScope leaving(*this, rank);
    handle_remove(HandleKind::kTrainer, request_loop->trainer()->handle);
    request_loop->cut();
    try {
      return engine_->close_trainer(request_loop->trainer());
    } catch (...) {
      take_out(request_loop->trainer());
      throw;
    }
  }

  Status stats(Peer& peer, frugal_stats* stats) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(attached(peer, &process));
    return engine_->stats(stats);
  }
  Status health(Peer& peer, int32_t* health) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(attached(peer, &process));
    *health = engine_->health();
    return FRUGAL_OK;
  }
  Status committed(Peer& peer, uint64_t* step) override {
    std::shared_ptr<Attached> process;
    FRUGAL_TRY(attached(peer, &process));
    return engine_->committed(step);
  }
  void gone(Peer& peer) override { ended(peer.id, false); }

  // A process has ended, as the watch reports, or its connection has.
  void ended(uint64_t id, bool by_watch) {
    const uint64_t watched = lose_process(id);
    if (watched && !by_watch) watch_->remove(watched);
  }

  // Returns the number of the process in the watch; 0: none, or another thread handles its end.
  uint64_t lose_process(uint64_t id) {
    std::shared_ptr<Attached> process;  // it ends without the lock
    UniqueLock lock(mu_);
    auto at = processes_.find(id);
    if (at == processes_.end() || at->second->gone) return 0;
    process = at->second;
    process->gone = true;
    left_.notify_all();
    process->calls->cut();
    while (!process->trainers.empty()) {
      std::unique_ptr<TrainerRequestLoop> request_loop = std::move(process->trainers.back());
      process->trainers.pop_back();
      lose(*request_loop);
      lock.unlock();
      request_loop.reset();
      lock.lock();
    }
    processes_.erase(id);
    return process->watched;
  }
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() {
  const KeepError why;
  stop();
}

Status Server::start(const char* address, std::shared_ptr<Engine> engine,
                     std::unique_ptr<Server>* out, frugal_log_fn log) {
  auto impl = std::make_unique<Impl>();
  impl->log_ = log;
  if (engine && !engine->arena().opened())
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "other processes can attach to an engine with FRUGAL_BACKING_SHM only: open it so");
  impl->engine_ = std::move(engine);
  FRUGAL_TRY(Watch::open(&impl->watch_));
  struct Undo {
    Impl* impl;
    ~Undo() {
      if (!impl) return;
      impl->stop_reaper();
    }
  } undo{impl.get()};
  FRUGAL_TRY(impl->reaper_.start());
  if (impl->engine_) {
    impl->mu_.assert_held();  // no other thread has it yet
    FRUGAL_TRY(impl->make_readable(*impl->engine_));
    impl->listen();
  }
  FRUGAL_TRY(ControlServer::start(address, impl.get(), &impl->control_));
  out->reset(new Server(std::move(impl)));
  undo.impl = nullptr;
  return FRUGAL_OK;
}

void Server::stop() {
  if (!impl_) return;
  impl_->ending_.store(true);
  {
    Lock lock(impl_->mu_);  // a process may be opening it
    if (impl_->engine_) impl_->engine_->stop_retrying();
  }
  if (impl_->control_) impl_->control_->stop();
  impl_->watch_.reset();
  impl_->stop_reaper();
  if (impl_->own_engine_ && impl_->engine_) impl_->engine_->shutdown();
  impl_.reset();
}

}  // namespace frugal
