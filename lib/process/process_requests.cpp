#include "process/process_requests.h"

#include <algorithm>

#include "engine/config_check.h"

namespace frugal {
namespace {

// Events of a trace that a process which only observes may have kept here: 32 MiB.
constexpr uint64_t kMostObserved = uint64_t{1} << 19;

}  // namespace

ProcessRequestLoop::~ProcessRequestLoop() {
  end();
  if (trace_) engine_->forget_trace(trace_);
}

Status ProcessRequestLoop::handle(const Header& request) {
  const Call call = static_cast<Call>(request.type);
  if (observes_ && (call == Call::kPut || call == Call::kDelete || call == Call::kSetOptimizer))
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "this process has attached with FRUGAL_OBSERVE, which only observes: open without "
                "it to change the engine");
  if (call == Call::kRead) return read(request, nullptr);
  if (call == Call::kFlush) return engine_->flush({after_ns(request.args[0])});
  if (call == Call::kMetrics) {
    FRUGAL_TRY(engine_->metrics(&text_));
    add(text_.data(), text_.size());
    return FRUGAL_OK;
  }
  if (call == Call::kTraceStart) {
    if (observes_ && request.args[0] > kMostObserved)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "events is %llu: with FRUGAL_OBSERVE it must be 1..%llu",
                  static_cast<unsigned long long>(request.args[0]),
                  static_cast<unsigned long long>(kMostObserved));
    return engine_->start_trace(request.args[0], &trace_);
  }
  if (call == Call::kTraceStop) {
    const uint64_t bytes = channel_->payload_left();
    if (bytes > kMostPath) return broken("a path of more than 4096 bytes");
    text_.resize(bytes);
    FRUGAL_TRY(take(text_.data(), bytes));
    return engine_->stop_trace(request.args[0] ? text_.c_str() : nullptr);
  }
  if (call == Call::kNextTable) {
    text_.clear();
    args_[0] = request.args[0];
    FRUGAL_TRY(engine_->next_table(&args_[0], &text_));
    add(text_.data(), text_.size());
    return FRUGAL_OK;
  }
  if (call < Call::kCount || call > Call::kDescribe) return broken("there is no such call");
  return rows_call(call, request);
}

// Rows outside steps: a case for each call.
Status ProcessRequestLoop::rows_call(Call call, const Header& request) {
  TableRef table;
  FRUGAL_TRY(engine_->table_of(request.args[0], &table));
  const uint64_t n = request.args[1];
  const uint32_t flags = static_cast<uint32_t>(request.args[2]);
  const size_t row_bytes = table->rows.exported_bytes(flags & FRUGAL_WITH_STATE);
  kept_.reserve(3);
  auto keys = [&](const uint64_t** out) -> Status {
    Buffer b;
    FRUGAL_TRY(take_buffer(engine_->own_pool(), n, sizeof(uint64_t), &b));
    *out = b.as<uint64_t>();
    kept_.push_back(std::move(b));
    return FRUGAL_OK;
  };
  auto room = [&](size_t bytes, char** out) -> Status {
    Buffer b;
    FRUGAL_TRY(engine_->own_pool().get(bytes, &b));
    *out = b.data();
    kept_.push_back(std::move(b));
    return FRUGAL_OK;
  };
  const uint64_t* given = nullptr;
  char* out = nullptr;
  switch (call) {
    case Call::kCount:
      return engine_->count(*table, &args_[0]);
    case Call::kKeys: {
      args_[0] = request.args[1];
      // Room for the rows that exist, since a request names any number. At least one key, since a
      // row may come now.
      const size_t capacity = std::min(request.args[2], std::max<uint64_t>(1, table->rows.count()));
      FRUGAL_TRY(room(capacity * sizeof(uint64_t), &out));
      size_t found = 0;
      FRUGAL_TRY(
          engine_->keys(*table, &args_[0], reinterpret_cast<uint64_t*>(out), capacity, &found));
      args_[1] = found;
      add(out, found * sizeof(uint64_t));
      return FRUGAL_OK;
    }
    case Call::kGet: {
      FRUGAL_TRY(keys(&given));
      FRUGAL_TRY(room(n * row_bytes + 64, &out));
      char* found = nullptr;
      FRUGAL_TRY(room(n + 64, &found));
      FRUGAL_TRY(engine_->get(*table, given, n, flags, reinterpret_cast<float*>(out), row_bytes,
                              reinterpret_cast<uint8_t*>(found)));
      add(found, n);
      // Only rows that exist: the reply must not carry what is in the memory for the others.
      for (uint64_t i = 0; i < n;) {
        uint64_t end = i;
        while (end < n && found[end] == found[i]) ++end;
        if (found[i]) add(out + i * row_bytes, (end - i) * row_bytes);
        i = end;
      }
      return FRUGAL_OK;
    }
    case Call::kPut: {
      FRUGAL_TRY(keys(&given));
      Buffer rows;
      FRUGAL_TRY(take_buffer(engine_->own_pool(), n, row_bytes, &rows));
      const float* from = rows.as<float>();
      kept_.push_back(std::move(rows));
      return engine_->put(*table, given, n, flags, from, row_bytes);
    }
    case Call::kDelete:
      FRUGAL_TRY(keys(&given));
      return engine_->remove(*table, given, n, &args_[0]);
    case Call::kSetOptimizer: {
      frugal_optimizer optimizer;
      FRUGAL_TRY(take(&optimizer, sizeof optimizer));
      FRUGAL_TRY(check_optimizer(optimizer));
      return engine_->set_optimizer(*table, request.args[1], optimizer);
    }
    case Call::kDescribe: {
      FRUGAL_TRY(room(sizeof(frugal_table_info), &out));
      FRUGAL_TRY(engine_->describe(*table, reinterpret_cast<frugal_table_info*>(out)));
      add(out, sizeof(frugal_table_info));
      return FRUGAL_OK;
    }
    default:
      return FRUGAL_ERR_INTERNAL;
  }
}

}  // namespace frugal
