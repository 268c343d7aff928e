// A step of a trainer of this process, as lookups and pushes see it. For the engine's sources only.
#pragma once
#include <optional>

#include "engine/row_path.h"
#include "engine/wait.h"

namespace frugal {

// Holds the slots of a call's undeclared keys until their rows exist.
class Engine::CallHold {
 public:
  CallHold(Engine& engine, const Vector<Access>& accesses) : engine_(engine), accesses_(accesses) {
    for (const Access& a : accesses_)
      if (counts(a)) ++own(*a.table).calls;
  }
  ~CallHold() {
    for (const Access& a : accesses_) {
      if (!counts(a)) continue;
      Table& table = own(*a.table);
      if (a.part && !(kept_ && table.rows.tier())) a.part->release_hold(table.rows);
      engine_.end_holding(table);
    }
  }
  // Slots of rows with a storage tier stay held until the step is committed or undone: for so many
  // accesses keep() needs room.
  size_t to_keep() const {
    if (engine_.tiered_tables_.load(std::memory_order_relaxed) == 0) return 0;
    return static_cast<size_t>(std::count_if(accesses_.begin(), accesses_.end(),
                                             [](const Access& a) { return keeps(a); }));
  }
  void keep(Vector<CreatedRows>* created) {
    for (const Access& a : accesses_) {
      if (!keeps(a)) continue;
      CreatedRows& c = created->emplace_back();
      c.table = std::static_pointer_cast<Table>(a.table);
      c.held = a.part;
    }
    kept_ = true;
  }

 private:
  static bool counts(const Access& a) { return !a.whole && !a.table->keys_are_slots; }
  static bool keeps(const Access& a) { return counts(a) && own(*a.table).rows.tier(); }
  Engine& engine_;
  const Vector<Access>& accesses_;
  bool kept_ = false;
};

class Engine::LocalStep final : public StepView {
 public:
  // `timed`: the time of a lookup. `numbers`: the ops' numbers in another process's call. Null: the
  // ops are a whole call of this process.
  LocalStep(Engine& engine, Trainer& t, TraceSpan* span, TimedLookup* timed,
            const OpNumbers* numbers);
  Status begin(Use use) override;
  Status resolve(const frugal_op* ops, const GpuOp* gpu, Use use) override;
  Status create() override;
  Status rows_of(const Access& access, RowSource* out) override;
  Status show_device(const Access&, DeviceWork&) override { return FRUGAL_OK; }
  Status row_awaited() override { return engine_.row_awaited(&until_); }
  Status end(bool on_device) override;
  BufferPool& sums(bool on_device) override {
    return on_device ? engine_.memory_.pinned : engine_.memory_.sums();
  }
  bool keeps_gradients() const override;
  bool streams_sums() const override { return engine_.pacing_.deferred(); }
  void count(Use use, const Counts& counts) override;

 private:
  static constexpr size_t kSmallBytes = 32 << 10;  // of rows
  bool is_small() const;
  Engine& engine_;
  Trainer& t_;
  TraceSpan* const span_;  // may be null, as the next two
  TimedLookup* const timed_;
  const OpNumbers* const numbers_;
  Deadline until_;  // of waiting for rows that are being written
  std::optional<Counted> busy_;
  std::optional<CallHold> hold_;  // until the rows exist
};

}  // namespace frugal
