// Attaching, tables, rows outside steps.
#include "process/client.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/handles.h"
#include "engine/config_check.h"

namespace frugal {

// --- Life ----------------------------------------------------------------------------------------

Status Client::open(const frugal_config& config, std::shared_ptr<Client>* out) {
  std::shared_ptr<Client> c(new Client(config));
  FRUGAL_TRY(c->attach(config));
  *out = std::move(c);
  return FRUGAL_OK;
}

Status Client::attach(const frugal_config& config) {
  OpenReply reply;
  FRUGAL_TRY(controller_.open(config, &reply));
  Descriptors d{reply.descriptors};
  FRUGAL_TRY(controller_.take(reply, d));
  std::unique_ptr<Channel> channel;
  FRUGAL_TRY(d.channel(1, false, &channel));
  rpc_.open(std::move(channel));
  config_.staleness = reply.config.staleness;
  config_.lookahead = reply.config.lookahead;
  config_.world_size = reply.config.world_size;
  config_.timeout_ms = config.timeout_ms;
  joins_.open(reply.config.world_size);
  // Where ranks share the processors, more threads would only delay each other.
  const uint32_t share = std::max<uint32_t>(1, cpu_count() / reply.config.world_size);
  FRUGAL_TRY(helpers_.start(std::min(config.flush_threads, share - 1)));
  return controller_.watch();
}

void Client::cut_channels() noexcept {
  Lock lock(mu_);
  if (rpc_.opened()) rpc_.channel().cut();
  for (auto& weak : trainers_)
    if (auto t = weak.lock()) t->channel().cut();
}

Client::~Client() {
  const KeepError why;
  shutdown();
}

void Client::shutdown() {
  if (!controller_.begin_close()) return;
  // All trainers are marked before the first is cut: what the end of one undoes is not for calls of
  // the others to report.
  {
    Lock lock(mu_);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) t->closing.store(true);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) t->channel().cut();
  }
  auto next = [this](auto list) {  // takes no memory
    Lock lock(mu_);
    auto& of = this->*list;
    auto item = of.empty() ? nullptr : of.back().lock();
    for (; !of.empty() && !item; item = of.empty() ? nullptr : of.back().lock()) of.pop_back();
    if (item) of.pop_back();
    return item;
  };
  while (RemoteTrainerRef t = next(&Client::trainers_)) {
    bool ended = false;
    try {
      ended = close_trainer(t, false) != FRUGAL_ERR_BAD_HANDLE;
    } catch (const std::bad_alloc&) {
    }
    if (!ended) {
      // Another thread closes it, or it cannot be closed. One of its calls may be reading what is
      // released below.
      Lock call(t->call_mu);
      if (t->gpu) t->gpu->take_device_work();  // kernels read what is about to be unmapped
    }
    handle_remove(HandleKind::kTrainer, t->handle);
  }
  while (RemoteTableRef t = next(&Client::tables_)) handle_remove(HandleKind::kTable, t->handle);
  if (rpc_.opened()) rpc_.channel().cut();  // calls of other threads end
  controller_.disconnect();
  helpers_.stop();
  pins_->unpin();
  controller_.close(rpc_mu_, mu_);
}

Status Client::health() {
  FRUGAL_TRY(controller_.check());
  int32_t h = FRUGAL_OK;
  if (rpc_.channel().is_cut()) {
    if (controller_.see_end(FRUGAL_ERR_PEER_LOST)) return controller_.lost();
    FRUGAL_TRY(controller_.check());
    return fail(
        FRUGAL_ERR_PEER_LOST,
        "the controller did not reply to a call of this process: close the engine and open it "
        "again");
  }
  if (Status s = controller_.answered(controller_.control().health(config_.timeout_ms, &h))) {
    (void)controller_.see_end(s);
    return s;
  }
  return h;
}

Status Client::committed(uint64_t* step) {
  return controller_.outlive([&]() -> Status {
    if (Controller::Remaining remaining{controller_})
      return controller_.controller_memory().committed(step);
    FRUGAL_TRY(controller_.check());
    return controller_.answered(controller_.control().committed(config_.timeout_ms, step));
  });
}

Status Client::stats(frugal_stats* out) {
  FRUGAL_TRY(controller_.check());
  take_late_replies(deadline(FRUGAL_TIMEOUT_DEFAULT).at);
  return controller_.answered(controller_.control().stats(config_.timeout_ms, out));
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
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "a path of %zu bytes: it has at most %llu",
                absolute.size(), static_cast<unsigned long long>(kMostPath));
  Exchange e{Call::kTraceStop, {path != nullptr}, {}};
  e.add(absolute.data(), absolute.size());
  return ask(e);
}

// --- Tables --------------------------------------------------------------------------------------

// A table as the controller describes it, mapped and not yet known here.
Status Client::map_table(TableReply& reply, const char* name, RemoteTableRef* out) {
  Descriptors d{reply.descriptors};
  if (reply.numbers.size() != 5)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
  auto t = std::allocate_shared<RemoteTable>(HeapAllocator<RemoteTable>(), pins_);
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
    if (reply.numbers[1] & (1u << i)) FRUGAL_TRY(d.map(next++, &t->arrays[i]));
  if (!t->arrays[Rows::kValues].base ||
      t->arrays[Rows::kValues].bytes / t->layout.value_pitch < reply.info.capacity)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent too little memory for table '%s'", name);
  t->ledger = reply.numbers[2];
  t->lazy = reply.numbers[3] != 0;
  t->kinds = reply.numbers[4];
  const Mapping &values = t->arrays[Rows::kValues], &state = t->arrays[Rows::kState];
  t->rows = t->layout.at(values.base, nullptr);
  t->pinned.over_rows(values, reply.info.capacity, t->layout.value_pitch);
  if (state.base) {
    t->pinned_state = std::make_unique<PinnedSlabs>(pins_);
    t->pinned_state->over_rows(state, reply.info.capacity, t->layout.state_pitch);
  }
  *out = std::move(t);
  return FRUGAL_OK;
}

Status Client::take_table(TableReply& reply, const char* name, AnyTableRef* out) {
  RemoteTableRef t;
  FRUGAL_TRY(map_table(reply, name, &t));
  Lock lock(mu_);
  if (controller_.closed()) return controller_.check();
  // A table has one handle in an engine, even if two threads take it at the same time.
  std::erase_if(tables_, [](auto& w) { return w.expired(); });
  for (auto& weak : tables_)
    if (auto known = weak.lock(); known && known->id == reply.id) {
      known->take_kind(*t);
      *out = std::move(known);
      return FRUGAL_OK;
    }
  tables_.reserve(tables_.size() + 1);
  t->handle = handle_of<AnyTable>(t);
  if (!t->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  tables_.push_back(t);
  *out = std::move(t);
  return FRUGAL_OK;
}

// The tables that this process has and has not dropped.
Vector<RemoteTableRef> Client::tables() {
  Vector<RemoteTableRef> out;
  Lock lock(mu_);
  for (auto& weak : tables_)
    if (auto table = weak.lock(); table && !table->dropped.load()) out.push_back(std::move(table));
  return out;
}

// Maps the state of a table again, if the table has another kind of optimizer by now.
Status Client::see_kind(RemoteTable& table) {
  TableReply reply;
  const char* name = table.name.c_str();
  const Status s =
      controller_.answered(controller_.control().find_table(name, config_.timeout_ms, &reply));
  if (s == FRUGAL_ERR_NOT_FOUND) return FRUGAL_OK;  // another process has dropped it
  FRUGAL_TRY(s);
  RemoteTableRef now;
  FRUGAL_TRY(map_table(reply, name, &now));
  if (now->id == table.id) table.take_kind(*now);
  return FRUGAL_OK;
}

// Updates the tables to which another process has given another kind of optimizer.
Status Client::see_kinds() {
  uint64_t kinds = 0;
  FRUGAL_TRY(controller_.kinds(&kinds));
  if (kinds_seen_.load(std::memory_order_acquire) == kinds) return FRUGAL_OK;
  for (const RemoteTableRef& table : tables()) FRUGAL_TRY(see_kind(*table));
  kinds_seen_.store(kinds, std::memory_order_release);
  return FRUGAL_OK;
}

Status Client::create_table(const frugal_table_config& config, AnyTableRef* out) {
  FRUGAL_TRY(controller_.check());
  TableReply reply;
  FRUGAL_TRY(
      controller_.answered(controller_.control().create_table(config, config_.timeout_ms, &reply)));
  FRUGAL_TRY(take_table(reply, config.name, out));
  if (!(*out)->created_here.exchange(true)) return FRUGAL_OK;
  return table_exists();
}

Status Client::find_table(const char* name, AnyTableRef* out) {
  FRUGAL_TRY(controller_.check());
  TableReply reply;
  FRUGAL_TRY(
      controller_.answered(controller_.control().find_table(name, config_.timeout_ms, &reply)));
  return take_table(reply, name, out);
}

Status Client::next_table(uint64_t* cursor, String* name) {
  Exchange e{Call::kNextTable, {*cursor}, {}};
  FRUGAL_TRY(ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
    if (bytes > kMostName)
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent a longer name than a table has");
    name->resize(bytes);
    return c.read(name->data(), bytes, until);
  }));
  *cursor = e.args[0];
  return FRUGAL_OK;
}

Status Client::drop_table(const AnyTableRef& table) {
  FRUGAL_TRY(controller_.check());
  take_late_replies(deadline(FRUGAL_TIMEOUT_DEFAULT).at);
  const Status s =
      controller_.answered(controller_.control().drop_table(own(*table).id, config_.timeout_ms));
  // The controller does not know it any more: an earlier call of this process has dropped it, or
  // another process has.
  if (s != FRUGAL_OK && s != FRUGAL_ERR_BAD_HANDLE) return s;
  table->dropped.store(true);
  handle_remove(HandleKind::kTable, table->handle);
  return FRUGAL_OK;
}

Status Client::describe(AnyTable& any, frugal_table_info* out) {
  RemoteTable& table = own(any);
  return controller_.outlive([&]() -> Status {
    if (Controller::Remaining remaining{controller_}) {
      TableReadout* t;
      FRUGAL_TRY(left_of(table, &t));
      Lock lock(table.kind_mu);
      *out = table.info;
      out->rows = t->count();
      return FRUGAL_OK;
    }
    Exchange e{Call::kDescribe, {table.id}, {}};
    return ask(
        e, [&](Channel& c, uint64_t, uint64_t until) { return c.read(out, sizeof *out, until); });
  });
}

Status Client::set_optimizer(AnyTable& table, uint64_t first_step,
                             const frugal_optimizer& optimizer) {
  Exchange e{Call::kSetOptimizer, {own(table).id, first_step}, {}};
  e.add(&optimizer, sizeof optimizer);
  FRUGAL_TRY(ask(e));
  // A program that changes many tables compares each once here, and all when the next step begins.
  uint64_t kinds = 0;
  FRUGAL_TRY(controller_.kinds(&kinds));
  return kinds_seen_.load() == kinds ? FRUGAL_OK : see_kind(own(table));
}

// --- Rows outside steps --------------------------------------------------------------------------

Status Client::count(AnyTable& any, uint64_t* out) {
  RemoteTable& table = own(any);
  return controller_.outlive([&]() -> Status {
    if (Controller::Remaining remaining{controller_}) {
      TableReadout* t;
      FRUGAL_TRY(left_of(table, &t));
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
  return controller_.outlive([&]() -> Status {
    if (Controller::Remaining remaining{controller_}) {
      TableReadout* t;
      FRUGAL_TRY(left_of(table, &t));
      *n = t->keys(cursor, out, capacity);
      return FRUGAL_OK;
    }
    Exchange e{Call::kKeys, {table.id, *cursor, capacity}, {}};
    FRUGAL_TRY(ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
      if (bytes / sizeof(uint64_t) > capacity)
        return fail(FRUGAL_ERR_INTERNAL, "more keys than were asked for");
      return c.read(out, bytes, until);
    }));
    *cursor = e.args[0];
    *n = e.args[1];
    return FRUGAL_OK;
  });
}

// Bytes of a row in a message of kGet or kPut.
Status Client::row_bytes(RemoteTable& t, uint32_t flags, size_t* bytes) {
  const bool with_state = flags & FRUGAL_WITH_STATE;
  if (with_state) FRUGAL_TRY(see_kinds());
  *bytes = t.exported_bytes(with_state);
  return FRUGAL_OK;
}

Status Client::get(AnyTable& any, const uint64_t* keys, size_t n, uint32_t flags, float* out,
                   size_t stride, uint8_t* found) {
  RemoteTable& table = own(any);
  return controller_.outlive([&]() -> Status {
    size_t bytes = 0, pitch = stride;
    auto check = [&] {
      if (stride == 0) pitch = bytes;
      return check_stride(stride, bytes, n);
    };
    if (Controller::Remaining remaining{controller_}) {
      TableReadout* t;
      FRUGAL_TRY(left_of(table, &t));
      const bool with_state = flags & FRUGAL_WITH_STATE;
      bytes = t->layout().exported_bytes(with_state);
      FRUGAL_TRY(check());
      if (table.info.key_space != FRUGAL_HASHED)
        FRUGAL_TRY(check_dense_ids(keys, n, nullptr, table.info.capacity));
      Vector<uint32_t> slots(n);
      Vector<char> scratch(t->layout().bytes());
      t->find(keys, n, nullptr, slots.data());
      for (size_t i = 0; i < n; ++i) {
        const bool there = slots[i] < kMissingSlot;
        if (found) found[i] = there;
        if (!there) continue;
        const TableReadout::Row row = t->row(slots[i], scratch.data());
        t->layout().export_row(row.values, with_state ? row.state : nullptr,
                               device::behind(out, i * pitch));
      }
      return FRUGAL_OK;
    }
    FRUGAL_TRY(row_bytes(table, flags, &bytes));
    FRUGAL_TRY(check());
    Exchange e{Call::kGet, {table.id, n, flags}, {}};
    e.add(keys, n * sizeof(uint64_t));
    return ask(e, [&](Channel& c, uint64_t answer, uint64_t until) -> Status {
      Vector<uint8_t> there(n);
      FRUGAL_TRY(c.read(there.data(), n, until));
      if (answer != n + std::count(there.begin(), there.end(), 1) * bytes)
        return fail(FRUGAL_ERR_BUSY,
                    "another process has just given the table another kind of optimizer, so that a "
                    "row's state is of another size: call again");
      // The reply has only rows that exist. `out` keeps what it has for the others.
      for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        while (pitch == bytes && end < n && there[end] == there[i]) ++end;
        if (there[i])
          FRUGAL_TRY(c.read(reinterpret_cast<char*>(out) + i * pitch, (end - i) * bytes, until));
        i = end;
      }
      if (found) std::copy(there.begin(), there.end(), found);
      return FRUGAL_OK;
    });
  });
}

Status Client::put(AnyTable& any, const uint64_t* keys, size_t n, uint32_t flags, const float* in,
                   size_t stride) {
  RemoteTable& table = own(any);
  size_t bytes = 0;
  FRUGAL_TRY(row_bytes(table, flags, &bytes));
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

}  // namespace frugal
