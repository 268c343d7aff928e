// A trainer process's side: one thread with the event loop and the socket. Callers hand it a call and
// sleep until the answer, as plain structs, is there.
#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/handles.h"
#include "base/os.h"
#include "process/control.h"
#include "process/control_limits.h"
#include "process/control_socket.h"
#include "process/control_structs.h"
#include "process/forked.h"
#include "process/kj_port.h"
#include "process/thread.h"

namespace frugal {
namespace {

constexpr char kClosed[] = "the connection to the controller was closed";

uint64_t until_of(int64_t timeout_ms) {
  if (timeout_ms < 0) return UINT64_MAX;
  const uint64_t now = now_ns();
  return static_cast<uint64_t>(timeout_ms) > (UINT64_MAX - now) / 1000000
             ? UINT64_MAX
             : now + static_cast<uint64_t>(timeout_ms) * 1000000;
}

int64_t left_of(uint64_t until) {
  if (until == UINT64_MAX) return -1;
  const uint64_t now = now_ns();
  return until > now ? static_cast<int64_t>((until - now + 999999) / 1000000) : 0;
}

// A call under way, shared by its caller and the loop's thread: either may be the last to let go.
struct Call {
  virtual ~Call() = default;

  void finish(Status status, int system_code, int device_code, const char* message) {
    std::lock_guard<std::mutex> lock(mutex);
    if (done) return;
    done = true;
    error = {status, system_code, device_code, 0, nullptr};
    try {
      text = message;
    } catch (const std::bad_alloc&) {
    }
    changed.notify_all();
  }
  void finish(Status status, const char* message) { finish(status, 0, 0, message); }

  // False: it is not finished by then.
  bool wait(uint64_t until) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!done) {
      const uint64_t now = now_ns();
      if (now >= until) return false;
      // Slices by the system's clock: a change of it makes one of them longer or shorter.
      const uint64_t ns = std::min<uint64_t>(until - now, 1000000000);
      changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::nanoseconds(ns));
    }
    return true;
  }
  // Of a finished call.
  Status result() {
    if (error.status == FRUGAL_OK) return FRUGAL_OK;
    error.message = text.c_str();
    return fail_as(error);
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  frugal_error error{};
  String text;
};

// What an answer gave, closed unless somebody takes it.
struct Given {
  Vector<int> descriptors;
  Vector<uint64_t> numbers;
  ~Given() {
    for (int fd : descriptors) close(fd);
  }
};

// Reads how a call ended; true if well.
bool ended_well(Call& call, wire::Error::Reader from) {
  if (from.getStatus() == FRUGAL_OK) return true;
  const Status status = from.getStatus() < 0 ? from.getStatus() : FRUGAL_ERR_INTERNAL;
  call.finish(status, from.getSystemCode(), from.getDeviceCode(), from.getMessage().cStr());
  return false;
}

// Takes duplicates of the descriptors, so that the controller's objects can be let go of at once.
kj::Promise<void> take_given(wire::Given::Reader from, std::shared_ptr<Call> call, Given* to) {
  auto numbers = from.getNumbers();
  to->numbers.reserve(numbers.size());
  for (uint64_t n : numbers) to->numbers.push_back(n);
  auto descriptors = from.getDescriptors();
  KJ_REQUIRE(descriptors.size() <= kMostDescriptors, "too many descriptors in an answer");
  kj::Promise<void> all = kj::READY_NOW;
  for (auto descriptor : descriptors) {
    // One after the other, in order.
    all = all.then([descriptor = wire::Descriptor::Client(descriptor)]() mutable {
                return descriptor.getFd().attach(kj::cp(descriptor));
              }).then([call, to](kj::Maybe<int> fd) {
      int copy = -1;
      KJ_IF_MAYBE(there, fd) {
        copy = fcntl(*there, F_DUPFD_CLOEXEC, 3);
        if (copy < 0) {
          call->finish(FRUGAL_ERR_OUT_OF_MEMORY, errno, 0,
                       "a descriptor that the controller has sent cannot be duplicated: this process has too many "
                       "open; raise its limit (ulimit -n)");
          return;
        }
      } else {
        call->finish(FRUGAL_ERR_OUT_OF_MEMORY, EMFILE, 0,
                     "a descriptor that the controller has sent has not arrived: this process has too "
                     "many open; raise its limit (ulimit -n)");
        return;
      }
      to->descriptors.push_back(copy);
    });
  }
  return all;
}

}  // namespace

struct ControlClient::Impl final : HeapObject, kj::TaskSet::ErrorHandler {
  // Of the loop's thread, as long as it runs.
  struct Link {
    SocketMessages messages;
    capnp::TwoPartyVatNetwork network;
    capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
    wire::Session::Client session = nullptr;
    kj::Promise<void> watch = nullptr;
    kj::Promise<void> end = nullptr;
    Link(KjPort& port, int socket)
        : messages(port, socket, kMostMessageWords, true, false),
          network(messages, kMostDescriptors, capnp::rpc::twoparty::Side::CLIENT, reader_options()),
          rpc(capnp::makeRpcClient(network)) {}
  };

  const uint32_t generation = process_generation();
  String address;
  int socket = -1;  // until the thread has it
  Credentials controller;
  int pidfd = -1;
  KjPort port;
  std::thread thread;
  std::atomic<bool> lost{false};
  Link* link = nullptr;
  kj::TaskSet* tasks = nullptr;
  kj::Own<kj::PromiseFulfiller<void>> stopped;
  std::mutex waiting_mutex;
  Vector<Call*> waiting;  // for their answers
  bool closed = false;    // nobody waits any more

  void taskFailed(kj::Exception&&) override {}

  // Calls that are under way, or come later, end with this.
  void tell_lost(Call& call) {
    call.finish(FRUGAL_ERR_PEER_LOST, text("the controller at %.200s (process %d) is gone, or has ended "
                                           "the connection",
                                           address.c_str(), static_cast<int>(controller.pid))
                                          .c_str());
  }

  void run() {
    Quiet quiet;
    kj::EventLoop loop(port);
    kj::WaitScope scope(loop);
    try {
      auto paf = kj::newPromiseAndFulfiller<void>();
      stopped = kj::mv(paf.fulfiller);
      Link its(port, std::exchange(socket, -1));
      kj::TaskSet all(*this);
      link = &its;
      tasks = &all;
      its.end = its.network.onDisconnect().then([this] { lost.store(true); }).eagerlyEvaluate(nullptr);
      // The process is dead, whoever else may hold the socket.
      if (pidfd >= 0)
        its.watch = port.ready(pidfd, POLLIN)
                        .then([this] { shutdown(link->messages.socket(), SHUT_RDWR); })
                        .eagerlyEvaluate(nullptr);
      paf.promise.wait(scope);
      link = nullptr;
      tasks = nullptr;
    } catch (...) {
      link = nullptr;
      tasks = nullptr;
    }
    lost.store(true);
  }

  // Begins a call in the loop's thread: `begin` gives the promise of what has to come for it.
  void post(std::shared_ptr<Call> call, std::function<kj::Promise<void>(Link&)> begin) {
    port.post([this, call, begin = std::move(begin)] {
      if (!link || lost.load()) return tell_lost(*call);
      auto failed = [this, call](kj::Exception&& e) {
        switch (e.getType()) {
          case kj::Exception::Type::DISCONNECTED:
            return tell_lost(*call);
          case kj::Exception::Type::OVERLOADED:
            return call->finish(FRUGAL_ERR_OUT_OF_MEMORY, e.getDescription().cStr());
          case kj::Exception::Type::UNIMPLEMENTED:
            return call->finish(FRUGAL_ERR_UNSUPPORTED, e.getDescription().cStr());
          default:
            return call->finish(FRUGAL_ERR_INTERNAL, e.getDescription().cStr());
        }
      };
      try {
        tasks->add(kj::evalNow([&] { return begin(*link); })
                       .then([call] { call->finish(FRUGAL_OK, ""); }, kj::mv(failed)));
      } catch (const std::bad_alloc&) {
        call->finish(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for a call to the controller");
      }
    });
  }

  Status check() const {
    if (generation != process_generation())
      return fail(FRUGAL_ERR_FORKED, "the connection to the controller belongs to the parent of this process");
    return FRUGAL_OK;
  }

  // Makes the call and waits for its end.
  Status call(const char* what, int64_t timeout_ms, std::shared_ptr<Call> call,
              std::function<kj::Promise<void>(Link&)> begin) {
    FRUGAL_TRY(check());
    // Who closes lets go of what the loop has not begun, or not ended: it is told here.
    struct Waits {
      Impl& impl;
      Call* call;
      ~Waits() {
        std::lock_guard<std::mutex> lock(impl.waiting_mutex);
        std::erase(impl.waiting, call);
      }
    } waits{*this, call.get()};
    {
      std::lock_guard<std::mutex> lock(waiting_mutex);
      if (closed) return fail(FRUGAL_ERR_CLOSED, kClosed);
      waiting.push_back(call.get());
    }
    if (lost.load()) {
      tell_lost(*call);
    } else {
      post(call, std::move(begin));
    }
    if (call->wait(until_of(timeout_ms))) return call->result();
    return fail(FRUGAL_ERR_TIMEOUT,
                "the controller at %.200s has not answered \"%s\" within %lld ms; it may do it all the same",
                address.c_str(), what, static_cast<long long>(timeout_ms));
  }

  ~Impl() {
    if (socket >= 0) ForkedDescriptors::close(socket);
    if (pidfd >= 0) close(pidfd);
  }

  void close_link() {
    {
      std::lock_guard<std::mutex> lock(waiting_mutex);
      closed = true;
      for (Call* call : waiting) call->finish(FRUGAL_ERR_CLOSED, kClosed);
    }
    if (!thread.joinable()) return;
    port.post(stop);
    thread.join();
  }
  struct Stop final : KjPort::Work {
    explicit Stop(Impl& i) : impl(i) {}
    void run() override {
      if (impl.stopped) impl.stopped->fulfill();
    }
    Impl& impl;
  } stop{*this};

  Status attach(uint32_t version, uint64_t until, bool* again);
};

Status ControlClient::Impl::attach(uint32_t version, uint64_t until, bool* again) {
  FRUGAL_TRY(peer_of(socket, &controller));
  pidfd = pidfd_of(socket, controller.pid);
  FRUGAL_TRY(port.open());
  { Quiet once; }  // what kj keeps is made here: a child of a fork might find it half made
  thread = quiet_thread([this] { run(); });
  auto made = std::make_shared<Call>();
  const Status s = call("attach", left_of(until), made, [made, version](Link& link) {
    capnp::MallocMessageBuilder scratch;
    auto vat = scratch.getRoot<capnp::rpc::twoparty::VatId>();
    vat.setSide(capnp::rpc::twoparty::Side::SERVER);
    auto request = link.rpc.bootstrap(vat).castAs<wire::Control>().attachRequest();
    request.setVersion(version);
    return request.send().then([made, &link](auto answer) {
      if (ended_well(*made, answer.getError())) link.session = answer.getSession();
    });
  });
  // A controller that is just going, or is full, may be followed by one that is not.
  *again = s == FRUGAL_ERR_PEER_LOST || s == FRUGAL_ERR_CLOSED;
  return s;
}

Status ControlClient::connect(const char* address, int64_t timeout_ms,
                              std::unique_ptr<ControlClient>* out, uint32_t version) {
  out->reset();
  const uint64_t until = until_of(timeout_ms);
  try {
    for (uint64_t pause = 1000000;; pause = std::min<uint64_t>(pause * 2, 50000000)) {
      Attempt attempt = connect_once(address);
      bool again = attempt.again;
      Status s = attempt.status;
      if (attempt.socket >= 0) {
        std::unique_ptr<Impl> impl(new Impl);
        impl->socket = attempt.socket;
        impl->address = address;
        std::unique_ptr<ControlClient> client(new ControlClient(impl.get()));
        Impl* its = impl.release();
        s = its->attach(version, until, &again);
        if (s == FRUGAL_OK) {
          *out = std::move(client);
          return FRUGAL_OK;
        }
        client.reset();
      }
      if (!again) return s;
      if (now_ns() + pause >= until) {
        if (attempt.socket >= 0)
          return fail(s, "the controller at %.200s ends the connection at once: it is stopping, has as many "
                         "connections as it takes, or is of another user", address);
        return fail_errno(FRUGAL_ERR_TIMEOUT, attempt.code, "no controller at %.200s within %lld ms", address,
                          static_cast<long long>(timeout_ms));
      }
      usleep(static_cast<useconds_t>(pause / 1000));
    }
  } catch (const std::exception&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory, or no thread, for a connection to the controller");
  }
}

void ControlClient::disconnect() {
  // In a forked child there is no thread to wait for: what it left is let be.
  if (impl_->generation == process_generation()) impl_->close_link();
}

ControlClient::~ControlClient() {
  if (!impl_ || impl_->generation != process_generation()) return;
  impl_->close_link();
  delete impl_;
}

namespace {

struct GivenCall : Call {
  Given given;
  template <class Reply>
  void move_to(Reply* reply) {
    reply->descriptors = std::move(given.descriptors);
    given.descriptors.clear();
    reply->numbers = std::move(given.numbers);
  }
};
struct OpenCall : GivenCall {
  frugal_config config;
};
struct TableCall : GivenCall {
  uint64_t id = 0;
  frugal_table_info info;
};

// The answer is kept until its descriptors have been taken.
template <class Answer>
kj::Promise<void> take_table(Answer&& answer, std::shared_ptr<TableCall> call) {
  if (!ended_well(*call, answer.getError())) return kj::READY_NOW;
  auto table = answer.getTable();
  call->id = table.getId();
  take(table.getInfo(), &call->info);
  auto given = take_given(table.getGiven(), call, &call->given);
  return given.attach(kj::mv(answer));
}

void move_table(TableCall& from, TableReply* to) {
  to->id = from.id;
  to->info = from.info;
  from.move_to(to);
}

// What a caller's struct says must last until the loop's thread has read it, which a caller that ran
// out of time does not wait for.
String kept(const char* text) { return text ? String(text) : String(); }

}  // namespace

// Without memory for a call it is not made.
#define CALL_OR_NO_MEMORY(...)                                                                    \
  try {                                                                                           \
    __VA_ARGS__                                                                                   \
  } catch (const std::bad_alloc&) {                                                               \
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for a call to the controller");              \
  }

Status ControlClient::ping(int64_t timeout_ms) {
  CALL_OR_NO_MEMORY(
      return impl_->call("ping", timeout_ms, std::make_shared<Call>(), [](Impl::Link& link) {
        return link.session.pingRequest().send().ignoreResult();
      });)
}

Status ControlClient::open(const frugal_config& config, int64_t timeout_ms, OpenReply* reply) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<OpenCall>();
      FRUGAL_TRY(impl_->call("open", timeout_ms, made, [made, config](Impl::Link& link) {
        auto request = link.session.openRequest();
        put(config, request.initConfig());
        return request.send().then([made](auto answer) -> kj::Promise<void> {
          if (!ended_well(*made, answer.getError())) return kj::READY_NOW;
          take(answer.getConfig(), &made->config);
          auto given = take_given(answer.getGiven(), made, &made->given);
          return given.attach(kj::mv(answer));
        });
      }));
      reply->config = made->config;
      made->move_to(reply);
      return FRUGAL_OK;)
}

Status ControlClient::create_table(const frugal_table_config& config, int64_t timeout_ms,
                                   TableReply* reply) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<TableCall>();
      String name = kept(config.name);
      FRUGAL_TRY(impl_->call("createTable", timeout_ms, made, [made, config, name](Impl::Link& link) {
        auto request = link.session.createTableRequest();
        frugal_table_config asked = config;
        asked.name = name.c_str();
        put(asked, request.initConfig());
        return request.send().then([made](auto answer) { return take_table(kj::mv(answer), made); });
      }));
      move_table(*made, reply);
      return FRUGAL_OK;)
}

Status ControlClient::find_table(const char* name, int64_t timeout_ms, TableReply* reply) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<TableCall>();
      String asked = kept(name);
      FRUGAL_TRY(impl_->call("findTable", timeout_ms, made, [made, asked](Impl::Link& link) {
        auto request = link.session.findTableRequest();
        request.setName(asked.c_str());
        return request.send().then([made](auto answer) { return take_table(kj::mv(answer), made); });
      }));
      move_table(*made, reply);
      return FRUGAL_OK;)
}

Status ControlClient::drop_table(uint64_t id, int64_t timeout_ms) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<Call>();
      return impl_->call("dropTable", timeout_ms, made, [made, id](Impl::Link& link) {
        auto request = link.session.dropTableRequest();
        request.setId(id);
        return request.send().then([made](auto answer) { (void)ended_well(*made, answer.getError()); });
      });)
}

namespace {

struct JoinCall : GivenCall {
  // Who comes second sees to it that a rank which has joined and which nobody has is let go.
  enum State { kAsked, kJoined, kGivenUp };
  std::atomic<int> state{kAsked};
  uint64_t number = kAnyJoin;  // when it has joined
};

}  // namespace

Status ControlClient::join(const frugal_trainer_config& config, int64_t timeout_ms, JoinReply* reply) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<JoinCall>();
      String device = kept(config.device);
      const Status s = impl_->call("join", timeout_ms, made, [made, config, device](Impl::Link& link) {
        auto request = link.session.joinRequest();
        frugal_trainer_config asked = config;
        asked.device = device.c_str();
        put(asked, request.initConfig());
        return request.send().then([made, &link, rank = config.rank](auto answer) -> kj::Promise<void> {
          if (!ended_well(*made, answer.getError())) return kj::READY_NOW;
          auto numbers = answer.getGiven().getNumbers();
          const uint64_t number = numbers.size() ? numbers[0] : kAnyJoin;
          made->number = number;
          if (made->state.exchange(JoinCall::kJoined) == JoinCall::kGivenUp) {
            auto back = link.session.leaveRequest();
            back.setRank(rank);
            back.setLost(true);
            back.setJoined(number);
            return back.send().ignoreResult();
          }
          auto given = take_given(answer.getGiven(), made, &made->given);
          return given.attach(kj::mv(answer));
        });
      });
      if (s == FRUGAL_OK) {
        made->move_to(reply);
        return s;
      }
      if (made->state.exchange(JoinCall::kGivenUp) == JoinCall::kJoined) {
        frugal_error why;
        end_call(s);
        last_error(&why);
        const String message = why.message;  // the next failure's text takes its place
        why.message = message.c_str();
        (void)leave(config.rank, true, timeout_ms, made->number);
        return fail_as(why);
      }
      return s;)
}

Status ControlClient::leave(uint32_t rank, bool lost, int64_t timeout_ms, uint64_t joined) {
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<Call>();
      return impl_->call("leave", timeout_ms, made, [made, rank, lost, joined](Impl::Link& link) {
        auto request = link.session.leaveRequest();
        request.setRank(rank);
        request.setLost(lost);
        request.setJoined(joined);
        return request.send().then([made](auto answer) { (void)ended_well(*made, answer.getError()); });
      });)
}

Status ControlClient::stats(int64_t timeout_ms, frugal_stats* stats) {
  struct StatsCall : Call {
    frugal_stats stats;
  };
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<StatsCall>();
      FRUGAL_TRY(impl_->call("stats", timeout_ms, made, [made](Impl::Link& link) {
        return link.session.statsRequest().send().then([made](auto answer) {
          if (ended_well(*made, answer.getError())) take(answer.getStats(), &made->stats);
        });
      }));
      *stats = made->stats;
      return FRUGAL_OK;)
}

Status ControlClient::health(int64_t timeout_ms, int32_t* health) {
  struct HealthCall : Call {
    int32_t health = 0;
  };
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<HealthCall>();
      FRUGAL_TRY(impl_->call("health", timeout_ms, made, [made](Impl::Link& link) {
        return link.session.healthRequest().send().then([made](auto answer) {
          if (ended_well(*made, answer.getError())) made->health = answer.getHealth();
        });
      }));
      *health = made->health;
      return FRUGAL_OK;)
}

Status ControlClient::committed(int64_t timeout_ms, uint64_t* step) {
  struct CommittedCall : Call {
    uint64_t step = 0;
  };
  CALL_OR_NO_MEMORY(
      auto made = std::make_shared<CommittedCall>();
      FRUGAL_TRY(impl_->call("committed", timeout_ms, made, [made](Impl::Link& link) {
        return link.session.committedRequest().send().then([made](auto answer) {
          if (ended_well(*made, answer.getError())) made->step = answer.getStep();
        });
      }));
      *step = made->step;
      return FRUGAL_OK;)
}

pid_t ControlClient::controller_pid() const { return impl_->controller.pid; }
int ControlClient::controller_pidfd() const { return impl_->pidfd; }
bool ControlClient::lost() const { return impl_->lost.load(); }

}  // namespace frugal
