// Tables that come from a checkpoint.
#include <algorithm>

#include "checkpoint/stored_checkpoints.h"
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

// Leaves the tables that are asked for.
Status keep_tables(const frugal_restore_config& config, Manifest* m) {
  Vector<ManifestTable> kept;
  for (size_t i = 0; i < config.table_count; ++i) {
    const char* const name = config.tables[i];
    const auto at = std::find_if(m->tables.begin(), m->tables.end(),
                                 [&](const ManifestTable& t) { return t.name == name; });
    if (at == m->tables.end())
      return fail(FRUGAL_ERR_NOT_FOUND,
                  "checkpoint %llu has no table '%.300s', or it is named twice: give others",
                  static_cast<unsigned long long>(m->sequence), name);
    kept.push_back(std::move(*at));
    m->tables.erase(at);
  }
  m->tables = std::move(kept);
  return FRUGAL_OK;
}

}  // namespace

Status Engine::may_restore(const Manifest& m) {
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
  return FRUGAL_OK;
}

// Creates a table of a checkpoint, without rows, as the next of `made`. In the engine's own folder
// the table keeps its number.
Status Engine::make_restored(const Manifest& m, const ManifestTable& t, bool own,
                             Vector<TableRef>* made) {
  frugal_table_config made_as = t.config;
  made_as.name = t.name.c_str();
  made_as.optimizer = t.optimizer;
  if (const Status bad = check_table(made_as)) {
    const String why = recorded_message();
    return fail(bad == FRUGAL_ERR_UNSUPPORTED ? bad : FRUGAL_ERR_DAMAGED,
                "checkpoint %llu: table '%s' cannot have been created: %s",
                static_cast<unsigned long long>(m.sequence), t.name.c_str(), why.c_str());
  }
  FRUGAL_TRY(check_rows(t));
  TableRef table;
  FRUGAL_TRY(create_table(made_as, &table, false, own ? t.number : 0, true));
  made->push_back(table);  // it has room
  ControlLock lock(mu_);
  table->config.optimizer = t.config.optimizer;
  table->schedule.clear();
  table->schedule[0] = t.optimizer;
  for (const LaterOptimizer& later : t.later) table->schedule[later.first_step] = later.optimizer;
  table->has_state.store(t.has_state);
  return FRUGAL_OK;
}

// Creates the tables of a checkpoint, and reads their rows and what the ranks gave. After a failure
// `made` has those that were created.
Status Engine::load(Folder& folder, const Manifest& m, bool own, Vector<TableRef>* made,
                    BlobsRef* blobs) {
  made->reserve(m.tables.size());
  CheckpointLoader loader(folder, declarations_, own);
  for (const ManifestTable& t : m.tables) {
    FRUGAL_TRY(make_restored(m, t, own, made));
    FRUGAL_TRY(loader.add(*made->back(), t));
  }
  FRUGAL_TRY(loader.load());
  for (const TableRef& t : *made) {
    declarations_.recount_unknown(*t);
    if (own) t->tracked->restored();
  }
  if (own) FRUGAL_TRY(checkpoints_.based_on(m));
  // A checkpoint that is taken before the next step has them, too.
  if (!checkpoints_.opened()) return FRUGAL_OK;
  return load_blobs(folder, m, config_.world_size, memory_.unread(), blobs);
}

Status Engine::restore(const frugal_restore_config& config, frugal_checkpoint_info* info) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  const bool own = !config.folder;
  std::shared_ptr<Folder> folder;
  if (own)
    folder = checkpoints_.folder();
  else
    FRUGAL_TRY(Folder::open(config.folder, Folder::Use::kRead, &folder));
  if (!folder)
    return fail(FRUGAL_ERR_NOT_FOUND,
                "the engine has no folder for checkpoints: open one, or name one");
  Manifest m;
  File held;
  FRUGAL_TRY(open_checkpoint(*folder, config.number, config.name, &m, &held));
  const frugal_checkpoint_info found = info_of(m);
  if (config.tables) FRUGAL_TRY(keep_tables(config, &m));
  FRUGAL_TRY(may_restore(m));
  Vector<TableRef> made;
  BlobsRef blobs;
  Status status;
  try {
    status = load(*folder, m, own, &made, &blobs);
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
  if (blobs) checkpoints_.restored(std::move(blobs));
  if (info) *info = found;
  return FRUGAL_OK;
}

}  // namespace frugal
