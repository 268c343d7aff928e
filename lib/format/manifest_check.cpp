// What a manifest may say. Its writer and its reader check the same.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "arith/optimizer.h"
#include "format/manifest.h"

namespace frugal {
namespace {

constexpr uint64_t kLastStep = UINT64_MAX - 65;
constexpr uint64_t kMostRows = UINT32_MAX - 1;
constexpr uint32_t kMostElements = 65536, kMostRanks = 4096;
constexpr size_t kMostTableName = 255;
constexpr uint64_t kMostFileBytes = INT64_MAX;
constexpr uint32_t kOptimizerFlags = FRUGAL_OPT_NESTEROV | FRUGAL_OPT_MEAN_RANKS |
                                     FRUGAL_OPT_NO_BIAS_CORRECTION | FRUGAL_OPT_NEW_STATE;

// Functions below return what is wrong, or an empty text.
using Wrong = String;
#define FRUGAL_TRY_RIGHT(expression)                              \
  do {                                                            \
    if (Wrong wrong = (expression); !wrong.empty()) return wrong; \
  } while (0)

unsigned long long shown(uint64_t n) { return n; }

Wrong wrong_bound(const char* what, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return {};
  return text("%s is %llu, which is not in %llu..%llu", what, shown(value), shown(least),
              shown(most));
}

Wrong wrong_kind(const char* what, int64_t value, int64_t last) {
  if (value >= 0 && value <= last) return {};
  return text("%s is %lld, which is unknown", what, static_cast<long long>(value));
}

Wrong wrong_number(const char* what, float value) {
  return std::isfinite(value) ? Wrong() : text("%s is not finite", what);
}

Wrong wrong_flags(const char* what, uint32_t flags, uint32_t known) {
  return flags & ~known ? text("%s has the unknown flags 0x%x", what, flags & ~known) : Wrong();
}

Wrong wrong_optimizer(const frugal_optimizer& o) {
  static constexpr struct {
    const char* name;
    float frugal_optimizer::*at;
  } kNumbers[] = {{"lr", &frugal_optimizer::lr},
                  {"eps", &frugal_optimizer::eps},
                  {"momentum", &frugal_optimizer::momentum},
                  {"dampening", &frugal_optimizer::dampening},
                  {"beta1", &frugal_optimizer::beta1},
                  {"beta2", &frugal_optimizer::beta2},
                  {"rho", &frugal_optimizer::rho},
                  {"ftrl_lambda1", &frugal_optimizer::ftrl_lambda1},
                  {"ftrl_lambda2", &frugal_optimizer::ftrl_lambda2},
                  {"ftrl_beta", &frugal_optimizer::ftrl_beta},
                  {"initial_accumulator", &frugal_optimizer::initial_accumulator},
                  {"weight_decay_l2", &frugal_optimizer::weight_decay_l2},
                  {"weight_decay", &frugal_optimizer::weight_decay},
                  {"clip_value", &frugal_optimizer::clip_value},
                  {"clip_norm", &frugal_optimizer::clip_norm},
                  {"weight_bound", &frugal_optimizer::weight_bound},
                  {"grad_scale", &frugal_optimizer::grad_scale}};
  FRUGAL_TRY_RIGHT(wrong_kind("optimizer.kind", o.kind, arith::kLastOptimizer));
  FRUGAL_TRY_RIGHT(wrong_flags("optimizer.flags", o.flags, kOptimizerFlags));
  for (const auto& n : kNumbers) {
    const float value = o.*n.at;
    if (!std::isfinite(value)) return text("optimizer.%s is not finite", n.name);
  }
  return {};
}

Wrong wrong_config(const frugal_table_config& c) {
  FRUGAL_TRY_RIGHT(wrong_kind("key_space", c.key_space, FRUGAL_HASHED));
  FRUGAL_TRY_RIGHT(wrong_kind("dtype", c.dtype, FRUGAL_F32));
  FRUGAL_TRY_RIGHT(wrong_bound("rows", c.rows, 1, kMostRows));
  FRUGAL_TRY_RIGHT(wrong_bound("dim", c.dim, 1, kMostElements));
  FRUGAL_TRY_RIGHT(wrong_kind("init", c.init, FRUGAL_INIT_XAVIER));
  FRUGAL_TRY_RIGHT(wrong_number("init_a", c.init_a));
  FRUGAL_TRY_RIGHT(wrong_number("init_b", c.init_b));
  FRUGAL_TRY_RIGHT(wrong_kind("nan_policy", c.nan_policy, FRUGAL_NAN_ACCEPT));
  const bool dense = c.key_space == FRUGAL_DENSE;
  FRUGAL_TRY_RIGHT(wrong_flags("flags", c.flags, dense ? FRUGAL_TABLE_LAZY : 0));
  return wrong_optimizer(c.optimizer);
}

// All changes are for steps after `next`, the first one that the checkpoint does not have.
Wrong wrong_later(const ManifestTable& t, uint64_t next) {
  FRUGAL_TRY_RIGHT(wrong_bound("the number of changes", t.later.size(), 0, kMostLaterOptimizers));
  // Its kind was checked: GCOVR_EXCL_BR_START
  const arith::Optimizer is = arith::optimizer_of(t.optimizer.kind);
  // GCOVR_EXCL_BR_STOP
  for (const LaterOptimizer& l : t.later) {
    FRUGAL_TRY_RIGHT(wrong_bound("the step of a change", l.first_step, next + 1, kLastStep));
    next = l.first_step;
    FRUGAL_TRY_RIGHT(wrong_optimizer(l.optimizer));
    const bool same_state = !(is.hypers & arith::kInitialAccumulator) ||
                            std::memcmp(&l.optimizer.initial_accumulator,
                                        &t.optimizer.initial_accumulator, sizeof(float)) == 0;
    if (l.optimizer.kind != t.optimizer.kind || !same_state)
      return text("the change for step %llu has another kind of optimizer or initial_accumulator",
                  shown(l.first_step));
  }
  return {};
}

Wrong wrong_format(const RowFormat& f, const frugal_table_config& c, int32_t optimizer) {
  if (f == RowFormat::of(c.dim, ElementType::kFloat32, optimizer)) return {};
  return text(
      "the format of its rows is not that of its dim and optimizer: dim %u, element %u, optimizer "
      "%d, %u bytes of values, %u columns of state of %u bytes",
      f.dim, static_cast<uint32_t>(f.element), f.optimizer, f.value_bytes, f.state_columns,
      f.state_column_bytes);
}

Wrong wrong_file(const ManifestFile& file, const ManifestTable& t, uint64_t next_file) {
  const ParameterFileInfo& f = file.info;
  if (f.number >= next_file)
    return text("its number is not below next_file, %llu", shown(next_file));
  if (f.table != t.number) return text("it is of table %llu", shown(f.table));
  FRUGAL_TRY_RIGHT(wrong_bound("its sequence", f.sequence, 1, kNumbersEnd - 1));
  FRUGAL_TRY_RIGHT(wrong_bound("the number of entries", f.entries, 0, kMostRecords));
  FRUGAL_TRY_RIGHT(wrong_bound("the number of records", f.records, 0, f.entries));
  FRUGAL_TRY_RIGHT(wrong_bound("the number of live records", file.live, 0, f.records));
  const uint64_t least = kFileBlock + f.records * t.format.record_bytes() + column_bytes(f.entries);
  FRUGAL_TRY_RIGHT(wrong_bound("its length", f.length, least, kMostFileBytes));
  return f.length % kFileBlock ? text("its length, %llu, is no number of blocks", shown(f.length))
                               : Wrong();
}

Wrong wrong_table(const ManifestTable& t, const Manifest& m) {
  if (t.number >= m.next_table)
    return text("its number, %llu, is not below next_table, %llu", shown(t.number),
                shown(m.next_table));
  FRUGAL_TRY_RIGHT(wrong_config(t.config));
  FRUGAL_TRY_RIGHT(wrong_optimizer(t.optimizer));
  FRUGAL_TRY_RIGHT(wrong_later(t, m.step == kNoStepYet ? 0 : m.step + 1));
  FRUGAL_TRY_RIGHT(wrong_format(t.format, t.config, t.optimizer.kind));
  FRUGAL_TRY_RIGHT(wrong_bound("the number of files", t.files.size(), 0, kMostFiles));
  uint64_t records = 0;
  for (size_t i = 0; i < t.files.size(); ++i) {
    const ManifestFile& f = t.files[i];
    Wrong wrong = wrong_file(f, t, m.next_file);
    if (wrong.empty() && i > 0 && f.info.number <= t.files[i - 1].info.number)
      wrong = text("it follows file %llu", shown(t.files[i - 1].info.number));
    if (!wrong.empty()) return text("file %llu: %s", shown(f.info.number), wrong.c_str());
    records += f.info.records;
  }
  return wrong_bound("the number of live rows", t.live_rows, 0, std::min(records, t.config.rows));
}

// Of the tables together.
Wrong wrong_tables(const Manifest& m) {
  Vector<const String*> names;
  Vector<uint64_t> files;
  size_t count = 0;
  for (const ManifestTable& t : m.tables) count += t.files.size();
  names.reserve(m.tables.size());
  files.reserve(count);
  for (size_t i = 0; i < m.tables.size(); ++i) {
    const ManifestTable& t = m.tables[i];
    if (t.name.empty() || t.name.size() > kMostTableName || t.name.find('\0') != String::npos)
      return text("table %llu has no name of 1..%zu bytes", shown(t.number), kMostTableName);
    if (i > 0 && t.number <= m.tables[i - 1].number)
      return text("table %llu follows table %llu", shown(t.number), shown(m.tables[i - 1].number));
    if (Wrong wrong = wrong_table(t, m); !wrong.empty())
      return text("table '%.64s': %s", t.name.c_str(), wrong.c_str());
    names.push_back(&t.name);
    for (const ManifestFile& f : t.files) files.push_back(f.info.number);
  }
  std::sort(names.begin(), names.end(), [](const String* a, const String* b) { return *a < *b; });
  const auto name = std::adjacent_find(names.begin(), names.end(),
                                       [](const String* a, const String* b) { return *a == *b; });
  if (name != names.end()) return text("two tables have the name '%.64s'", (*name)->c_str());
  std::sort(files.begin(), files.end());
  const auto file = std::adjacent_find(files.begin(), files.end());
  return file == files.end() ? Wrong() : text("two tables have file %llu", shown(*file));
}

Wrong wrong_blobs(const Manifest& m) {
  if (m.blobs.empty() && m.blob_bytes > 0)
    return text("there is a blob file of %llu bytes, and no blob", shown(m.blob_bytes));
  FRUGAL_TRY_RIGHT(wrong_bound("the blob file's length", m.blob_bytes, 0, kMostFileBytes));
  for (size_t i = 0; i < m.blobs.size(); ++i) {
    const ManifestBlob& b = m.blobs[i];
    if (b.rank >= m.world_size)
      return text("there is a blob of rank %u, and world_size is %u", b.rank, m.world_size);
    if (i > 0 && b.rank <= m.blobs[i - 1].rank)
      return text("the blob of rank %u follows that of rank %u", b.rank, m.blobs[i - 1].rank);
    if (b.at > m.blob_bytes || b.bytes > m.blob_bytes - b.at)
      return text("the blob of rank %u, %llu bytes at %llu, is not inside of a blob file of %llu",
                  b.rank, shown(b.bytes), shown(b.at), shown(m.blob_bytes));
  }
  return {};
}

}  // namespace

String manifest_fault(const Manifest& m) {
  FRUGAL_TRY_RIGHT(wrong_bound("sequence", m.sequence, 1, kNumbersEnd - 1));
  if (m.step != kNoStepYet) FRUGAL_TRY_RIGHT(wrong_bound("step", m.step, 0, kLastStep));
  FRUGAL_TRY_RIGHT(wrong_bound("world_size", m.world_size, 1, kMostRanks));
  if (m.name.size() > kMostCheckpointName || m.name.find('\0') != String::npos ||
      m.name.find('/') != String::npos)
    return text("the checkpoint's name has a slash, a 0, or more than %zu bytes",
                kMostCheckpointName);
  FRUGAL_TRY_RIGHT(wrong_bound("next_table", m.next_table, 0, kNumbersEnd));
  FRUGAL_TRY_RIGHT(wrong_bound("next_file", m.next_file, 0, kNumbersEnd));
  FRUGAL_TRY_RIGHT(wrong_tables(m));
  return wrong_blobs(m);
}

#undef FRUGAL_TRY_RIGHT

}  // namespace frugal
