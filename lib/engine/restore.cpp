// The folder of checkpoints, and tables that come from one.
#include "engine/checkpoint_loader.h"
#include "engine/config_check.h"
#include "engine/wait.h"

namespace frugal {
namespace {

// The table that a manifest means, with its rows' bytes as its files have them.
Status check_rows(const ManifestTable& t) {
  const RowFormat rows = RowFormat::of(t.config.dim, ElementType::kFloat32, t.optimizer.kind);
  if (t.format == rows) return FRUGAL_OK;
  return fail(FRUGAL_ERR_DAMAGED, "table '%s': its files have other rows than its optimizer needs",
              t.name.c_str());
}

}  // namespace

Status Engine::open_folder(const char* path, uint32_t keep) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  return checkpoints_.open(path, keep);
}

Status Engine::close_folder() {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  return checkpoints_.close();
}

// All tables, or none.
Status Engine::restore(const char* path, uint64_t sequence, CheckpointInfo* info) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  std::shared_ptr<Folder> folder;
  if (!path) folder = checkpoints_.folder();
  if (!folder && !path)
    return fail(FRUGAL_ERR_NOT_FOUND, "the engine has no folder for checkpoints: name one");
  if (path) FRUGAL_TRY(Folder::open(path, Folder::Use::kRead, &folder));
  if (sequence == 0) {
    Vector<uint64_t> all;
    FRUGAL_TRY(list_manifests(*folder, &all));
    if (all.empty())
      return fail(FRUGAL_ERR_NOT_FOUND, "folder '%s' has no checkpoint", folder->path());
    sequence = all.back();
  }
  Manifest m;
  File held;
  FRUGAL_TRY(read_manifest(*folder, sequence, &m, &held));
  {
    ControlLock lock(mu_);
    if (ranks_.next_commit() != kNoStep)
      return fail(FRUGAL_ERR_BUSY, "steps have begun: restore into an engine that has just opened");
    for (const TrainerRef& t : ranks_)
      if (t)
        return fail(FRUGAL_ERR_BUSY, "rank %u has joined: restore before trainers join", t->rank);
    for (const ManifestTable& t : m.tables)
      if (tables_.find(t.name.c_str()))
        return fail(FRUGAL_ERR_EXISTS, "there is a table '%s': restore before tables are created",
                    t.name.c_str());
    if (m.seed != config_.seed)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "the engine's seed is %llu and the checkpoint's %llu: new rows would be others",
                  static_cast<unsigned long long>(config_.seed),
                  static_cast<unsigned long long>(m.seed));
  }
  const bool own = !path;
  Vector<TableRef> made;
  made.reserve(m.tables.size());
  CheckpointLoader loader(*folder, own);
  const auto make = [&](const ManifestTable& t) -> Status {
    frugal_table_config config = t.config;
    config.name = t.name.c_str();
    config.optimizer = t.optimizer;
    if (const Status bad = check_table(config)) {
      const String why = recorded_message();
      return fail(bad == FRUGAL_ERR_UNSUPPORTED ? bad : FRUGAL_ERR_DAMAGED,
                  "checkpoint %llu: table '%s' cannot have been created: %s",
                  static_cast<unsigned long long>(m.sequence), t.name.c_str(), why.c_str());
    }
    FRUGAL_TRY(check_rows(t));
    TableRef table;
    FRUGAL_TRY(create_table(config, &table, false, own ? t.number : 0, true));
    made.push_back(table);
    {
      ControlLock lock(mu_);
      table->config.optimizer = t.config.optimizer;
      table->schedule.clear();
      table->schedule[0] = t.optimizer;
      for (const LaterOptimizer& later : t.later)
        table->schedule[later.first_step] = later.optimizer;
    }
    table->has_state.store(t.has_state);
    return loader.add(*table, t);
  };
  Status status = FRUGAL_OK;
  try {
    for (size_t i = 0; i < m.tables.size() && status == FRUGAL_OK; ++i) status = make(m.tables[i]);
    if (status == FRUGAL_OK) status = loader.load();
    for (size_t i = 0; i < made.size() && status == FRUGAL_OK; ++i) {
      declarations_.recount_unknown(*made[i]);
      if (own) made[i]->tracked->restored();
    }
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the checkpoint's tables");
  }
  if (status != FRUGAL_OK) {
    // No thread knows these tables but by their names, and none has used them.
    const KeepError keep;
    for (const TableRef& t : made) remove_table(t);
    return status;
  }
  if (m.step != kNoStep) {
    ControlLock lock(mu_);
    ranks_.resume(m.step);
    tables_.each_window([&](Window& w) { w.set_next_commit(m.step + 1); });
  }
  if (info) *info = {m.sequence, m.step, m.name};
  return FRUGAL_OK;
}

}  // namespace frugal
