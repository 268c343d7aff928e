// Tables that come from a checkpoint.
#include <algorithm>
#include <cstring>

#include "checkpoint/stored_checkpoints.h"
#include "engine/config_check.h"
#include "engine/wait.h"
#include "format/blocks.h"

namespace frugal {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;  // of records that are read at once
constexpr uint32_t kColumnBlocks = 16;

// Reads the files of a table in the order of their checkpoints. A later entry of a key replaces an
// earlier one. Deletions of a checkpoint concern records of earlier ones.
class Loader {
 public:
  // `own`: the engine writes this folder, so that its next checkpoint can do without these records.
  Loader(const Folder& folder, Table& table, Declarations& declarations,
         const ManifestTable& manifest, bool own)
      : folder_(folder),
        table_(table),
        declarations_(declarations),
        manifest_(manifest),
        own_(own),
        blocks_(kColumnBlocks * sizeof(ColumnBlock)) {}
  Status load();

 private:
  struct Opened {
    ParameterFile file;
    uint32_t number;  // in the directory
  };
  Status damaged(const ParameterFile& file, const char* what) {
    return fail(FRUGAL_ERR_DAMAGED, "%s/%s: %s", folder_.path(),
                rows_name(file.info().number).c_str(), what);
  }
  // Calls of(first, entries, n) for the entries from .. to - 1.
  template <class Of>
  Status each_entry(ParameterFile& file, uint64_t from, uint64_t to, Of of);
  Status erase(ParameterFile& file);
  Status read(Opened& o);

  const Folder& folder_;
  Table& table_;
  Declarations& declarations_;
  const ManifestTable& manifest_;
  const bool own_;
  Blocks blocks_;
};

template <class Of>
Status Loader::each_entry(ParameterFile& file, uint64_t from, uint64_t to, Of of) {
  auto* blocks = reinterpret_cast<ColumnBlock*>(blocks_.at);
  for (uint64_t at = from; at < to;) {
    const auto first = static_cast<uint32_t>(at / ColumnBlock::kEntries);
    const auto end = static_cast<uint32_t>((to - 1) / ColumnBlock::kEntries + 1);
    const uint32_t n = std::min(kColumnBlocks, end - first);
    FRUGAL_TRY(file.read_column(first, n, blocks));
    for (uint32_t b = 0; b < n && at < to; ++b) {
      const uint64_t in = at % ColumnBlock::kEntries;
      const uint64_t most = std::min<uint64_t>(ColumnBlock::kEntries - in, to - at);
      const ColumnEntry* entries = blocks[b].entries + in;
      for (uint64_t i = 0; i < most; ++i)
        if (entries[i].sequence != file.info().sequence)
          return damaged(file, "an entry is of another checkpoint than the file");
      FRUGAL_TRY(of(at, entries, most));
      at += most;
    }
  }
  return FRUGAL_OK;
}

Status Loader::erase(ParameterFile& file) {
  const ParameterFileInfo& info = file.info();
  return each_entry(
      file, info.records, info.entries,
      [&](uint64_t, const ColumnEntry* entries, uint64_t n) -> Status {
        if (!table_.rows.any_key()) return damaged(file, "a deletion of a dense row");
        uint64_t keys[ColumnBlock::kEntries];
        uint32_t slots[ColumnBlock::kEntries];
        for (uint64_t i = 0; i < n; ++i) keys[i] = entries[i].key;
        FRUGAL_TRY(table_.rows.resolve(keys, n, nullptr, Rows::Missing::kLeave, slots, nullptr));
        FRUGAL_TRY(table_.rows.expect_deletions(n));
        size_t there = 0;
        for (uint64_t i = 0; i < n; ++i)
          if (slots[i] < kMissingSlot) slots[there++] = slots[i];
        table_.rows.uncreate(slots, there, true);
        return FRUGAL_OK;
      });
}

Status Loader::read(Opened& o) {
  ParameterFile& file = o.file;
  const ParameterFileInfo& info = file.info();
  Rows& rows = table_.rows;
  const RowLayout& layout = rows.layout();
  const auto most = static_cast<uint32_t>(
      std::clamp<size_t>(kPieceBytes / file.format().record_bytes(), 1, ColumnBlock::kEntries));
  Blocks records(file.records_room(0, most) + 2 * kFileBlock);
  return each_entry(
      file, 0, info.records, [&](uint64_t at, const ColumnEntry* entries, uint64_t n) -> Status {
        uint64_t keys[ColumnBlock::kEntries];
        uint32_t slots[ColumnBlock::kEntries];
        for (uint64_t i = 0; i < n; ++i) keys[i] = entries[i].key;
        if (rows.check_ids(keys, n, nullptr) != FRUGAL_OK)
          return damaged(file, "a key is no id of the table");
        FRUGAL_TRY(rows.resolve(keys, n, nullptr, Rows::Missing::kCreate, slots, nullptr));
        for (uint64_t i = 0; i < n;) {
          const auto first = static_cast<uint32_t>(at + i);
          const auto count = static_cast<uint32_t>(std::min<uint64_t>(most, n - i));
          FRUGAL_TRY(file.read_unverified(first, count, records.at));
          const RowWrite write(rows, slots + i, count, {RowWrite::What::kNew});
          const device::RowsRef& to = write.in_place();
          for (uint32_t r = 0; r < count; ++r, ++i) {
            const char* record = file.record_in(records.at, first, first + r);
            FRUGAL_TRY(file.verify_record(first + r, record, &keys[i]));
            const auto* values = reinterpret_cast<const float*>(record);
            device::store_elements(values, to.row(slots[i]), layout.dim);
            if (layout.state_floats)
              layout.import_state(values + layout.dim, to.state_row(slots[i]));
            if (own_)
              table_.tracked->files.set(slots[i], {o.number, first + r});
            else if (table_.tracked)
              table_.tracked->tracker.mark_changed(slots[i]);
          }
        }
        return FRUGAL_OK;
      });
}

Status Loader::load() {
  Vector<ManifestFile> files = manifest_.files;
  std::stable_sort(files.begin(), files.end(), [](const ManifestFile& a, const ManifestFile& b) {
    return a.info.sequence < b.info.sequence;
  });
  for (size_t from = 0, to; from < files.size(); from = to) {
    Vector<Opened> opened;
    for (to = from; to < files.size() && files[to].info.sequence == files[from].info.sequence;
         ++to) {
      opened.emplace_back();
      Opened& o = opened.back();
      FRUGAL_TRY(ParameterFile::open(folder_, files[to].info.number, true, &o.file));
      FRUGAL_TRY(o.file.expect(files[to].info));
      if (!(o.file.format() == manifest_.format))
        return damaged(o.file, "its rows are not those of the table");
      if (own_) FRUGAL_TRY(table_.tracked->files.add_file(files[to].info, &o.number));
    }
    for (Opened& o : opened) FRUGAL_TRY(erase(o.file));
    declarations_.recount_unknown(table_);  // other keys may have the slots of erased ones
    for (Opened& o : opened) FRUGAL_TRY(read(o));
  }
  return FRUGAL_OK;
}

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
  Vector<TableRef> made;
  made.reserve(m.tables.size());
  const auto make = [&](const ManifestTable& t) -> Status {
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
    FRUGAL_TRY(create_table(made_as, &table, false, own ? t.number : 0));
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
    FRUGAL_TRY(Loader(*folder, *table, declarations_, t, own).load());
    declarations_.recount_unknown(*table);
    if (own) table->tracked->restored();
    return FRUGAL_OK;
  };
  Status status = FRUGAL_OK;
  try {
    for (size_t i = 0; i < m.tables.size() && status == FRUGAL_OK; ++i) status = make(m.tables[i]);
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the checkpoint's tables");
  }
  if (status == FRUGAL_OK && own) status = checkpoints_.based_on(m);
  // A checkpoint that is taken before the next step has them, too.
  BlobsRef blobs;
  if (status == FRUGAL_OK && checkpoints_.opened())
    status = load_blobs(*folder, m, config_.world_size, memory_.unread(), &blobs);
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
