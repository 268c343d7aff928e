// Attaching, tables, rows outside steps.
#include "process/client.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/forked.h"
#include "base/handles.h"
#include "engine/config_check.h"
#include "process/exchange.h"

namespace frugal {

namespace {

constexpr uint64_t kLostNs = 50'000'000;   // until the end of the connection is known that has ended with the channel
constexpr uint64_t kEndNs = 2'000'000'000;  // between a controller's last connection and its end
constexpr int kLookMs = 5;                  // of which there is no event where its process lives
constexpr uint64_t kGraceNs = 5'000'000'000;  // that an answer may be late

void close_all(Vector<int>& descriptors) {
  for (int fd : descriptors)
    if (fd >= 0) ::close(fd);
  descriptors.clear();
}

// Closes those that nobody has taken.
struct Descriptors {
  Vector<int>& all;
  ~Descriptors() { close_all(all); }
  int take(size_t i) {
    const int fd = all[i];
    all[i] = -1;
    return fd;
  }
};

Status map_one(Descriptors& d, size_t i, bool writable, Mapping* out) {
  if (i >= d.all.size()) return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  FRUGAL_TRY(os_map_shared(d.all[i], writable, out));
  d.take(i);
  return FRUGAL_OK;
}

Status channel_at(Descriptors& d, size_t i, bool with_staging, std::unique_ptr<Channel>* out) {
  if (i + 1 >= d.all.size()) return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  const bool staging = i + 2 < d.all.size() && with_staging;
  FRUGAL_TRY(Channel::attach(d.all[i], d.all[i + 1], staging ? d.all[i + 2] : -1, out));
  d.take(i);
  d.take(i + 1);
  if (staging) d.take(i + 2);
  return FRUGAL_OK;
}

}  // namespace

// A call to the controller that has failed so may have been done there: it can be made again.
static bool may_be_done(Status s) { return s == FRUGAL_ERR_TIMEOUT || s == FRUGAL_ERR_OUT_OF_MEMORY; }

uint64_t answer_until(uint64_t at) { return at >= UINT64_MAX - kGraceNs ? UINT64_MAX : at + kGraceNs; }

RemoteTable::~RemoteTable() {
  if (pinner) {
    pinned.unpin(*pinner);
    pinned_state.unpin(*pinner);
  }
  for (Mapping& m : arrays) os_release(&m);
}

// --- Life ----------------------------------------------------------------------------------------

Status Client::open(const frugal_config& config, std::shared_ptr<Client>* out) {
  std::shared_ptr<Client> c(new Client(config));
  FRUGAL_TRY(c->attach(config));
  *out = std::move(c);
  return FRUGAL_OK;
}

Status Client::connect(const frugal_config& config, int64_t timeout_ms) {
  if (Status s = ControlClient::connect(config.service, timeout_ms, &control_)) {
    if (s != FRUGAL_ERR_TIMEOUT && s != FRUGAL_ERR_CLOSED) return s;
    frugal_error error;  // nobody serves the address
    end_call(s);
    last_error(&error);
    error.status = FRUGAL_ERR_PEER_LOST;
    return fail_as(error);
  }
  return watch_ ? FRUGAL_OK : Watch::open(&watch_);
}

Status Client::attach(const frugal_config& config) {
  frugal_config asked = config;
  asked.service = nullptr;
  asked.log = nullptr;
  asked.log_context = nullptr;
  OpenReply reply;
  const Deadline until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  int64_t left_ms = config.timeout_ms;
  for (int again = 2;; --again) {
    const uint64_t began = now_ns();
    FRUGAL_TRY(connect(config, left_ms));
    const Status s = of_controller(control_->open(asked, left_ms, &reply));
    if (s == FRUGAL_OK) break;
    // The controller waits for so long. A process that stood still meanwhile attaches again.
    const bool late = s == FRUGAL_ERR_PEER_LOST && now_ns() - began >= ControlLimits().open_ns;
    if (!late || again == 0 || until.passed()) return s;
    left_ms = static_cast<int64_t>(left_until(until) / 1'000'000);
  }
  Descriptors d{reply.descriptors};
  if (reply.numbers.size() != 3) return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
  if (d.all.empty())
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  regions_.open(ForkedDescriptors::open([&] { return d.take(0); }));
  FRUGAL_TRY(channel_at(d, 1, false, &channel_));
  if (const uint64_t versions = reply.numbers[1]; versions != kNoPlace)
    FRUGAL_TRY(in_arena(versions, &kept_, &versions_, kVersionWords));
  FRUGAL_TRY(in_arena(reply.numbers[2], &kept_, &remains_.root));
  remains_.regions = &regions_;
  config_.staleness = reply.config.staleness;
  config_.lookahead = reply.config.lookahead;
  config_.world_size = reply.config.world_size;
  config_.timeout_ms = config.timeout_ms;
  unsure_ = Vector<std::atomic<bool>>(reply.config.world_size);
  joins_ = Vector<std::atomic<bool>>(reply.config.world_size);
  // Where ranks share the processors out among themselves, more threads would only be in each other's way.
  const uint32_t share = std::max<uint32_t>(1, cpu_count() / reply.config.world_size);
  FRUGAL_TRY(helpers_.start(std::min(config.flush_threads, share - 1)));
  if (control_->controller_pidfd() >= 0) {
    const int fd = fcntl(control_->controller_pidfd(), F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return os_no_descriptor(errno, "the watch of the controller's process");
    uint64_t id;
    Status s = watch_->add(fd, [this] { peer_ended(); }, &id);
    if (s != FRUGAL_OK) {
      ::close(fd);
      return s;
    }
  }
  // What the controller gives back goes here, too, although no call looks. Where it cannot be taken
  // in it is tried again, for as long as that takes.
  const int fd = ForkedDescriptors::open(
      [&] { return fcntl(regions_.socket(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1); });
  if (fd < 0) return os_no_descriptor(errno, "the watch of the controller's memory");
  uint64_t id;
  auto look = [this] {
    if (regions_.look() != FRUGAL_OK) usleep(10000);
  };
  if (Status s = watch_->follow(fd, look, &id)) {
    ForkedDescriptors::close(fd);
    return s;
  }
  control_->on_end([this] { connection_ended(); });
  return connected();
}

// Its end may have been seen to by now.
Status Client::connected() const {
  if (!control_->lost()) return FRUGAL_OK;
  return fail(FRUGAL_ERR_PEER_LOST,
              "the connection to the controller has ended: close the engine and open it again");
}

// The controller is gone: nobody waits for it any longer.
void Client::peer_ended() noexcept {
  std::lock_guard<std::mutex> lock(mu_);
  lost_.store(true);
  cut_channels();
}

// With mu_ held.
void Client::cut_channels() noexcept {
  if (channel_) channel_->cut();
  for (auto& weak : trainers_)
    if (auto t = weak.lock()) t->channel->cut();
}

// A controller whose end is seen is told as that. Of any other nothing tells any more when it ends.
void Client::connection_ended() noexcept {
  if (see_end(FRUGAL_ERR_PEER_LOST)) return;
  std::lock_guard<std::mutex> lock(mu_);
  cut_channels();
}

Client::~Client() {
  const KeepError why;
  shutdown();
}

void Client::shutdown() {
  if (closed_.exchange(true)) return;
  // All of them are marked before the first is cut: what the end of one undoes is not for the calls of the others to
  // tell.
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) t->closing.store(true);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) t->channel->cut();
  }
  auto next = [this](auto& of) {  // takes no memory
    std::lock_guard<std::mutex> lock(mu_);
    auto item = of.empty() ? nullptr : of.back().lock();
    for (; !of.empty() && !item; item = of.empty() ? nullptr : of.back().lock()) of.pop_back();
    if (item) of.pop_back();
    return item;
  };
  while (RemoteTrainerRef t = next(trainers_)) {
    bool ended = false;
    try {
      ended = close_trainer(t, false) != FRUGAL_ERR_BAD_HANDLE;
    } catch (const std::bad_alloc&) {
    }
    if (!ended) {
      // Another thread closes it, or nobody can. A call of its may be reading what is let go of below.
      std::lock_guard<std::mutex> call(t->call_mu);
      if (t->gpu) t->gpu->take_flight();  // kernels read what is about to be unmapped
    }
    handle_remove(HandleKind::kTrainer, t->handle);
  }
  while (RemoteTableRef t = next(tables_)) handle_remove(HandleKind::kTable, t->handle);
  if (channel_) channel_->cut();  // calls of other threads end
  watch_.reset();
  if (control_) control_->disconnect();  // and there it stays: calls of other threads may be on their way to it
  helpers_.stop();
  std::scoped_lock calls(channel_mu_, mu_, remains_mu_);
  regions_.unpin();
  remains_ = {};
  kept_.clear();
  regions_.close();
}

Status Client::lost() const {
  return fail(FRUGAL_ERR_PEER_LOST, "the controller is gone: open the engine again when there is another");
}

Status Client::check() const {
  if (closed_.load()) return engine_closed();
  return lost_.load() ? lost() : FRUGAL_OK;
}

// One that stops in good order says that it is closed, which this engine is not.
Status Client::of_controller(Status s) const {
  if (s != FRUGAL_ERR_CLOSED || closed_.load()) return s;
  return fail(FRUGAL_ERR_PEER_LOST,
              "the controller is stopping: the tables can be read out when it has ended; open the engine "
              "again when there is another");
}

// A controller that ends loses its connections a moment before its process, or its engine, counts as ended. Whether that
// was it.
bool Client::see_end(Status s) {
  if (s != FRUGAL_ERR_PEER_LOST) return false;
  pollfd p{control_->controller_pidfd(), POLLIN, 0};  // one that is negative is waited for in vain
  const uint64_t began = now_ns();
  do {
    if (closed_.load()) return false;
    if (Remaining(*this) || poll(&p, 1, kLookMs) == 1) {
      peer_ended();
      return true;
    }
  } while (now_ns() - began < (control_->lost() ? kEndNs : kLostNs));
  return false;
}

Status Client::health() {
  FRUGAL_TRY(check());
  int32_t h = FRUGAL_OK;
  if (channel_->is_cut()) {
    if (see_end(FRUGAL_ERR_PEER_LOST)) return lost();
    FRUGAL_TRY(check());
    return fail(FRUGAL_ERR_PEER_LOST, "the controller did not answer a call of this process: close the engine and open it again");
  }
  if (Status s = of_controller(control_->health(config_.timeout_ms, &h))) {
    (void)see_end(s);
    return s;
  }
  return h;
}

Status Client::committed(uint64_t* step) {
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) return remains_.committed(step);
    FRUGAL_TRY(check());
    return of_controller(control_->committed(config_.timeout_ms, step));
  });
}

Status Client::stats(frugal_stats* out) {
  FRUGAL_TRY(check());
  settle_all(deadline(FRUGAL_TIMEOUT_DEFAULT).at);
  return of_controller(control_->stats(config_.timeout_ms, out));
}

Status Client::request(Channel& channel, uint64_t sequence, const Exchange& e) {
  FRUGAL_TRY(check());
  Header h{};
  h.type = static_cast<uint32_t>(e.call);
  h.sequence = sequence;
  h.status = Patience::processor();
  std::copy(std::begin(e.args), std::end(e.args), h.args);
  const Status s = channel.send(h, e.pieces.data(), e.pieces.size(), overdue(e));
  return s == FRUGAL_OK ? s : not_answered(channel, s);
}

// The controller keeps to the call's time-out, which may be a short slice of a long wait. One that does not answer for
// the engine's time-out is as good as gone: what it would say later fits to nothing.
uint64_t Client::overdue(const Exchange& e) const {
  return answer_until(std::max(e.until, deadline(FRUGAL_TIMEOUT_DEFAULT).at));
}

// The engine's closing, or the end of the controller, is why a channel is cut if either has begun: who cuts for such a
// reason marks it first.
Status Client::not_answered(Channel& channel, Status s) {
  if (s != FRUGAL_ERR_TIMEOUT && s != FRUGAL_ERR_PEER_LOST) return s;
  if (s == FRUGAL_ERR_TIMEOUT) channel.cut();
  FRUGAL_TRY(check());
  if (s == FRUGAL_ERR_PEER_LOST) return s;
  return fail(FRUGAL_ERR_PEER_LOST, "the controller's process does not answer: close the engine, or the trainer");
}

Status Client::ask(Exchange& e) {
  return ask(e, [](Channel&, uint64_t, uint64_t) { return FRUGAL_OK; });
}

Status Client::flush(Deadline deadline) {
  Exchange e{Call::kFlush, {left_until(deadline)}, {}, deadline.at};
  return ask(e);
}

Status Client::metrics(String* out) {
  Exchange e{Call::kMetrics, {}, {}};
  return ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) {
    out->resize(bytes);
    return c.read(out->data(), bytes, until);
  });
}

Status Client::start_trace(size_t events) {
  Exchange e{Call::kTraceStart, {events}, {}};
  return ask(e);
}

Status Client::stop_trace(const char* path) {
  // The controller may be in another folder.
  String absolute;
  if (path && path[0] != '/') {
    char here[4096];
    if (!getcwd(here, sizeof here))
      return fail_errno(FRUGAL_ERR_INVALID_ARGUMENT, errno,
                        "the file '%.200s' cannot be written: give its whole path", path);
    absolute = String(here) + "/" + path;
  } else if (path) {
    absolute = path;
  }
  if (absolute.size() > kMostPath)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "a path of %zu bytes: it has at most %llu", absolute.size(),
                static_cast<unsigned long long>(kMostPath));
  Exchange e{Call::kTraceStop, {path != nullptr}, {}};
  e.add(absolute.data(), absolute.size());
  return ask(e);
}

// --- Tables --------------------------------------------------------------------------------------

Status Client::take_table(TableReply& reply, const char* name, AnyTableRef* out) {
  Descriptors d{reply.descriptors};
  if (reply.numbers.size() != 4) return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
  // A table has one handle in an engine, though two threads take it at once. With mu_ held.
  auto taken = [&] {
    *out = nullptr;
    std::erase_if(tables_, [](auto& w) { return w.expired(); });
    for (auto& weak : tables_)
      if (auto t = weak.lock(); t && t->id == reply.id) *out = std::move(t);
    return *out != nullptr;
  };
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (taken()) return FRUGAL_OK;
  }
  auto t = std::allocate_shared<RemoteTable>(HeapAllocator<RemoteTable>());
  t->session = shared_from_this();
  t->id = reply.id;
  t->name = name;
  t->info = reply.info;
  t->dim = reply.info.dim;
  t->any_key = reply.info.key_space == FRUGAL_HASHED;
  t->keys_are_slots = !t->any_key;
  t->capacity = reply.info.capacity;
  t->nan_policy = static_cast<int32_t>(static_cast<int64_t>(reply.numbers[0]));
  t->layout = RowLayout::of(reply.info.dim, reply.info.optimizer);
  t->stride = t->layout.sums_stride;
  size_t next = 0;
  for (uint32_t i = 0; i < Rows::kArrays; ++i)
    if (reply.numbers[1] & (1u << i)) FRUGAL_TRY(map_one(d, next++, false, &t->arrays[i]));
  if (!t->arrays[Rows::kValues].base ||
      t->arrays[Rows::kValues].bytes / t->layout.value_pitch < reply.info.capacity)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent too little memory for table '%s'", name);
  t->ledger = reply.numbers[2];
  t->lazy = reply.numbers[3] != 0;
  const Mapping &values = t->arrays[Rows::kValues], &state = t->arrays[Rows::kState];
  t->rows = t->layout.at(values.base, state.base);
  t->pinner = pinner_;
  t->pinned.over_rows(values, reply.info.capacity, t->layout.value_pitch);
  if (state.base) t->pinned_state.over_rows(state, reply.info.capacity, t->layout.state_pitch);
  std::lock_guard<std::mutex> lock(mu_);
  if (closed_.load()) return check();
  if (taken()) return FRUGAL_OK;
  tables_.reserve(tables_.size() + 1);
  t->handle = handle_of<AnyTable>(t);
  if (!t->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  tables_.push_back(t);
  *out = std::move(t);
  return FRUGAL_OK;
}

Status Client::create_table(const frugal_table_config& config, AnyTableRef* out) {
  FRUGAL_TRY(check());
  TableReply reply;
  FRUGAL_TRY(of_controller(control_->create_table(config, config_.timeout_ms, &reply)));
  FRUGAL_TRY(take_table(reply, config.name, out));
  if (!(*out)->created_here.exchange(true)) return FRUGAL_OK;
  return table_exists();
}

Status Client::find_table(const char* name, AnyTableRef* out) {
  FRUGAL_TRY(check());
  TableReply reply;
  FRUGAL_TRY(of_controller(control_->find_table(name, config_.timeout_ms, &reply)));
  return take_table(reply, name, out);
}

Status Client::next_table(uint64_t* cursor, String* name) {
  Exchange e{Call::kNextTable, {*cursor}, {}};
  FRUGAL_TRY(ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
    if (bytes > kMostName) return fail(FRUGAL_ERR_INTERNAL, "the controller sent a longer name than a table has");
    name->resize(bytes);
    return c.read(name->data(), bytes, until);
  }));
  *cursor = e.args[0];
  return FRUGAL_OK;
}

Status Client::drop_table(const AnyTableRef& table) {
  FRUGAL_TRY(check());
  settle_all(deadline(FRUGAL_TIMEOUT_DEFAULT).at);
  const Status s = of_controller(control_->drop_table(own(*table).id, config_.timeout_ms));
  // The controller does not know it any more: an earlier call of this process has dropped it, or another process has.
  if (s != FRUGAL_OK && s != FRUGAL_ERR_BAD_HANDLE) return s;
  table->dropped.store(true);
  handle_remove(HandleKind::kTable, table->handle);
  return FRUGAL_OK;
}

Status Client::describe(AnyTable& any, frugal_table_info* out) {
  RemoteTable& table = own(any);
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) {
      TableReadout* t;
      FRUGAL_TRY(remains_of(table, &t));
      *out = table.info;
      out->rows = t->count();
      return FRUGAL_OK;
    }
    Exchange e{Call::kDescribe, {table.id}, {}};
    return ask(e, [&](Channel& c, uint64_t, uint64_t until) { return c.read(out, sizeof *out, until); });
  });
}

Status Client::set_optimizer(AnyTable& table, uint64_t first_step, const frugal_optimizer& optimizer) {
  Exchange e{Call::kSetOptimizer, {own(table).id, first_step}, {}};
  e.add(&optimizer, sizeof optimizer);
  return ask(e);
}

// --- Rows outside steps --------------------------------------------------------------------------

// What the controller has left of a table. The first who asks works it out.
Status Client::remains_of(RemoteTable& table, TableReadout** out) {
  std::lock_guard<std::mutex> lock(table.readout_mu);
  if (!table.readout) {
    TableReadout::Source s;
    s.record = table.ledger;
    s.handle = table.id;
    s.name = table.name.c_str();
    s.layout = table.layout;
    s.optimizer = table.info.optimizer;
    std::copy(std::begin(table.arrays), std::end(table.arrays), s.arrays);
    s.capacity = table.info.capacity;
    s.hashed = table.info.key_space == FRUGAL_HASHED;
    s.lazy = table.lazy;
    FRUGAL_TRY(TableReadout::open(remains_, s, pool_, &table.readout));
  }
  *out = table.readout.get();
  return FRUGAL_OK;
}

Status Client::count(AnyTable& any, uint64_t* out) {
  RemoteTable& table = own(any);
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) {
      TableReadout* t;
      FRUGAL_TRY(remains_of(table, &t));
      *out = t->count();
      return FRUGAL_OK;
    }
    Exchange e{Call::kCount, {table.id}, {}};
    FRUGAL_TRY(ask(e));
    *out = e.args[0];
    return FRUGAL_OK;
  });
}

Status Client::keys(AnyTable& any, uint64_t* cursor, uint64_t* out, size_t capacity, size_t* n) {
  RemoteTable& table = own(any);
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) {
      TableReadout* t;
      FRUGAL_TRY(remains_of(table, &t));
      *n = t->keys(cursor, out, capacity);
      return FRUGAL_OK;
    }
    Exchange e{Call::kKeys, {table.id, *cursor, capacity}, {}};
    FRUGAL_TRY(ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
      if (bytes / sizeof(uint64_t) > capacity) return fail(FRUGAL_ERR_INTERNAL, "more keys than were asked for");
      return c.read(out, bytes, until);
    }));
    *cursor = e.args[0];
    *n = e.args[1];
    return FRUGAL_OK;
  });
}

// Bytes of a row as it travels.
static size_t row_bytes(const RemoteTable& t, uint32_t flags) {
  return (t.info.dim + (flags & FRUGAL_WITH_STATE ? t.info.state_floats : 0)) * sizeof(float);
}

Status Client::get(AnyTable& any, const uint64_t* keys, size_t n, uint32_t flags, float* out, size_t stride,
                   uint8_t* found) {
  RemoteTable& table = own(any);
  const size_t bytes = row_bytes(table, flags);
  FRUGAL_TRY(check_stride(stride, bytes, n));
  if (stride == 0) stride = bytes;
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) {
      TableReadout* t;
      FRUGAL_TRY(remains_of(table, &t));
      if (table.info.key_space != FRUGAL_HASHED) FRUGAL_TRY(check_dense_ids(keys, n, nullptr, table.info.capacity));
      Vector<uint32_t> slots(n);
      Vector<char> scratch(t->layout().bytes());
      t->find(keys, n, nullptr, slots.data());
      for (size_t i = 0; i < n; ++i) {
        const bool there = slots[i] < kMissingSlot;
        if (found) found[i] = there;
        if (!there) continue;
        const TableReadout::Row row = t->row(slots[i], scratch.data());
        float* to = reinterpret_cast<float*>(reinterpret_cast<char*>(out) + i * stride);
        std::memcpy(to, row.values, table.layout.value_bytes());
        if (flags & FRUGAL_WITH_STATE) table.layout.export_state(row.state, to + table.info.dim);
      }
      return FRUGAL_OK;
    }
    Exchange e{Call::kGet, {table.id, n, flags}, {}};
    e.add(keys, n * sizeof(uint64_t));
    return ask(e, [&](Channel& c, uint64_t, uint64_t until) -> Status {
      Vector<uint8_t> there(n);
      FRUGAL_TRY(c.read(there.data(), n, until));
      // The answer has the rows that are there, and the places of the others stay as they are.
      for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        while (stride == bytes && end < n && there[end] == there[i]) ++end;
        if (there[i]) FRUGAL_TRY(c.read(reinterpret_cast<char*>(out) + i * stride, (end - i) * bytes, until));
        i = end;
      }
      if (found) std::copy(there.begin(), there.end(), found);
      return FRUGAL_OK;
    });
  });
}

Status Client::put(AnyTable& any, const uint64_t* keys, size_t n, uint32_t flags, const float* in, size_t stride) {
  const RemoteTable& table = own(any);
  const size_t bytes = row_bytes(table, flags);
  FRUGAL_TRY(check_stride(stride, bytes, n));
  if (stride == 0) stride = bytes;
  Exchange e{Call::kPut, {table.id, n, flags}, {}};
  e.add(keys, n * sizeof(uint64_t));
  if (stride == bytes) {
    e.add(in, n * bytes);
  } else {
    for (size_t i = 0; i < n; ++i) e.add(reinterpret_cast<const char*>(in) + i * stride, bytes);
  }
  return ask(e);
}

Status Client::remove(AnyTable& table, const uint64_t* keys, size_t n, uint64_t* deleted) {
  Exchange e{Call::kDelete, {own(table).id, n}, {}};
  e.add(keys, n * sizeof(uint64_t));
  FRUGAL_TRY(ask(e));
  if (deleted) *deleted = e.args[0];
  return FRUGAL_OK;
}

// --- Joining -------------------------------------------------------------------------------------

Status Client::create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) {
  FRUGAL_TRY(check());
  // What another thread has just joined as would seem to be left from a call that has failed.
  if (joins_[config.rank].exchange(true))
    return fail(FRUGAL_ERR_EXISTS, "another thread of this process is joining as rank %u", config.rank);
  struct Joins {
    std::atomic<bool>& now;
    ~Joins() { now.store(false); }
  } joins_now{joins_[config.rank]};
  auto t = std::allocate_shared<RemoteTrainer>(HeapAllocator<RemoteTrainer>());
  t->session = shared_from_this();
  t->rank = config.rank;
  // The device is this process's own: the controller sees a rank that reads host memory, hands over sums, and is told
  // what to do to the lines of its caches.
  if (config.device && std::strcmp(config.device, "cpu") != 0) FRUGAL_TRY(open_gpu(config, &t->gpu));
  struct Joining {  // where it does not join after all
    Client& client;
    const Gpu* gpu;
    ~Joining() {
      if (gpu) client.leave_gpu(*gpu);
    }
  } joining{*this, t->gpu.get()};
  JoinReply reply;
  auto join = [&] {
    try {
      return of_controller(control_->join(config, config_.timeout_ms, &reply));
    } catch (const std::bad_alloc&) {
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to join as rank %u", config.rank);
    }
  };
  Status joins = join();
  // It may be this process's by an earlier call.
  if (joins == FRUGAL_ERR_EXISTS && unsure_[config.rank].load()) {
    const Status lost = lose_rank(config.rank, kAnyJoin);
    joins = lost == FRUGAL_OK ? join() : lost;  // nor is it known to be another's
  }
  if (joins == FRUGAL_ERR_BUSY && let_go_of_lost()) joins = join();
  if (joins != FRUGAL_OK) return give_up_join(config.rank, joins);
  unsure_[config.rank].store(false);
  // The rank is this process's now. If that comes to nothing it is lost: it has not done its part.
  struct Joined {
    Client* client;
    const uint32_t rank;
    const uint64_t joined;
    ~Joined() {
      if (!client) return;
      const KeepError why;
      (void)client->lose_rank(rank, joined);
    }
  } joined{this, config.rank, reply.numbers.empty() ? kAnyJoin : reply.numbers[0]};
  Descriptors d{reply.descriptors};
  auto set_up = [&]() -> Status {
    std::lock_guard<std::mutex> lock(mu_);
    FRUGAL_TRY(check());
    FRUGAL_TRY(connected());
    if (reply.numbers.size() != 2)
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
    t->joined = reply.numbers[0];
    FRUGAL_TRY(in_arena(reply.numbers[1], &t->home, &t->notices));
    FRUGAL_TRY(channel_at(d, 0, true, &t->channel));
    t->patience.emplace(config_.world_size, t->channel.get());
    t->channel->staging_arena(&t->staging);
    t->sums.cut_from(&t->staging);
    if (t->gpu) {
      t->sums.pin_with(pinner_);
      t->gpu->while_waiting([this, trainer = t.get()] { say_here(*trainer); });
    }
    t->cpu_ns = process_cpu_ns();
    std::erase_if(trainers_, [](auto& w) { return w.expired(); });
    trainers_.reserve(trainers_.size() + 1);
    t->handle = handle_of<AnyTrainer>(t);
    if (!t->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
    trainers_.push_back(t);
    return FRUGAL_OK;
  };
  FRUGAL_TRY(set_up());
  struct Known {  // to handles, until all others are told of its staging memory
    RemoteTrainer* t;
    ~Known() {
      if (t) handle_remove(HandleKind::kTrainer, t->handle);
    }
  } known{t.get()};
  {
    std::lock_guard<std::mutex> call(t->call_mu);
    Exchange e{Call::kMapped, {}, {}};
    FRUGAL_TRY(ask(*t, e));
  }
  // With its own staging memory: who has too few addresses for that joins nothing.
  FRUGAL_TRY(regions_.look());
  known.t = nullptr;
  joined.client = nullptr;
  joining.gpu = nullptr;
  *out = std::move(t);
  return FRUGAL_OK;
}

// Where that fails the rank stays taken until this process ends, or calls again.
Status Client::lose_rank(uint32_t rank, uint64_t joined) noexcept {
  unsure_[rank].store(true);
  Status s;
  try {
    s = of_controller(control_->leave(rank, true, config_.timeout_ms, joined));
  } catch (const std::bad_alloc&) {
    s = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to leave rank %u, which this process may have joined; call again", rank);
  }
  if (s != FRUGAL_OK && s != FRUGAL_ERR_NOT_FOUND) return s;
  unsure_[rank].store(false);
  return FRUGAL_OK;
}

// What the controller holds for trainers that have lost their ranks, of which it holds so many: they read none of it any
// more. True: it may have less by now.
bool Client::let_go_of_lost() {
  const KeepError why;
  bool any = false;
  for (size_t i = 0;; ++i) {
    RemoteTrainerRef t;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (i >= trainers_.size()) return any;
      t = trainers_[i].lock();
    }
    if (!t || t->closing.load()) continue;
    const std::unique_lock<std::mutex> call(t->call_mu, std::try_to_lock);
    if (!call || t->let_go) continue;
    {
      const std::unique_lock<std::mutex> late(t->late.mu, std::try_to_lock);
      if (!late || t->channel->look() == FRUGAL_OK) continue;
    }
    leave_step(*t);
    const Status s = control_->leave(t->rank, true, config_.timeout_ms, t->joined);
    t->let_go = s == FRUGAL_OK || s == FRUGAL_ERR_NOT_FOUND;
    any |= t->let_go;
  }
}

// A call to join has failed. The controller may have done its part of it: then the connection gives the rank back when the
// answer comes, and the next call here, if that is earlier.
Status Client::give_up_join(uint32_t rank, Status why) {
  std::lock_guard<std::mutex> lock(mu_);
  bool ours = !may_be_done(why);  // another trainer of this process has the rank
  for (auto& weak : trainers_)
    if (auto t = weak.lock()) ours |= t->rank == rank && !t->closing.load() && !t->channel->is_cut();
  if (!ours) unsure_[rank].store(true);
  return why;
}

Status Client::close_trainer(const AnyTrainerRef& trainer, bool abandoned) {
  const RemoteTrainerRef t = std::static_pointer_cast<RemoteTrainer>(trainer);
  if (t->closer.exchange(true)) return closes_already();
  struct Closer {  // what has failed can be made again
    RemoteTrainer& t;
    Status s = FRUGAL_ERR_OUT_OF_MEMORY;
    ~Closer() {
      if (s == FRUGAL_OK) handle_remove(HandleKind::kTrainer, t.handle);
      else t.closer.store(false);
    }
  } closer{*t};
  // A call of its that waits ends. The controller is told afterwards: what a call reads here is let go there.
  t->closing.store(true);
  t->channel->cut();
  std::lock_guard<std::mutex> call(t->call_mu);
  // Before anything can fail: nobody comes here again where the engine is being closed.
  for (auto& [id, batch] : t->batches) handle_remove(HandleKind::kBatch, batch->handle);
  t->batches.clear();
  // Kernels may be writing its staging memory, which may be another's when it has left.
  if (t->gpu) t->gpu->take_flight();
  Status s = lost_.load() || t->let_go ? FRUGAL_OK
                                       : control_->leave(t->rank, abandoned, config_.timeout_ms, t->joined);
  leave_step(*t);
  t->handed.clear();
  t->lines.clear();
  if (t->gpu && !std::exchange(t->left_gpu, true)) leave_gpu(*t->gpu);
  // The controller may not know it any more, if another process has taken its place, or if it has been told already.
  closer.s = s == FRUGAL_ERR_NOT_FOUND || s == FRUGAL_ERR_PEER_LOST || s == FRUGAL_ERR_CLOSED ? FRUGAL_OK : s;
  return closer.s;
}

Status Client::set_stream(AnyTrainer& t, void* stream) {
  // No call of the step protocol: an abort is told by the next one.
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(check());
  if (!t.gpu) return no_streams(t.rank);
  return t.gpu->set_stream(stream);
}

}  // namespace frugal
