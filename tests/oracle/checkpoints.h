// Checkpoints of a run: where a script has them, and how what is on disk is compared with the
// reference.
#ifndef FRUGAL_TESTS_ORACLE_CHECKPOINTS_H_
#define FRUGAL_TESTS_ORACLE_CHECKPOINTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frugal.h"
#include "oracle/script.h"
#include "reference/reference.h"

class TemporaryFolder;

namespace frugal_oracle {

// Adds checkpoints, and moments at which the engine is closed and another one goes on, to the
// actions between steps of a script. What else it has stays.
void AddCheckpoints(Script* script);

// All rows of all tables with their state, as the reference has them now.
Snapshot SnapshotOf(const frugal_reference::Reference& reference, size_t tables);

// The folder of a run, and the checkpoint that is being written.
class RunCheckpoints {
 public:
  using Fail = std::function<void(const std::string&)>;
  RunCheckpoints(const Script& script, Fail fail);
  ~RunCheckpoints();

  // Opens the folder for the engine. Returns false after a failure.
  bool Open(frugal_engine* engine);
  // Awaits the checkpoint that is being written, and compares it; then begins another one.
  void Begin(frugal_engine* engine, const OutsideAction& action);
  void Finish(frugal_engine* engine);
  // So many rows of a table were deleted.
  void Deleted(frugal_engine* engine, size_t table, uint64_t rows);
  // Rows that were created or deleted after a snapshot, before its checkpoint was awaited.
  uint64_t created() const { return created_; }
  uint64_t deleted() const { return deleted_; }
  // Closes the engine after a checkpoint. Returns one of another configuration that has restored
  // it, or null after a failure.
  frugal_engine* Resume(frugal_engine* engine, const OutsideAction& action);

 private:
  uint64_t Next(frugal_engine* engine);
  void Compare(frugal_engine* engine, const Snapshot& expected, const std::string& what);
  bool Expect(int32_t status, const char* call);

  const Script& script_;
  const Fail fail_;
  const std::unique_ptr<TemporaryFolder> folder_;
  uint64_t number_ = 0;  // of the one that is being written; 0: none
  const Snapshot* expected_ = nullptr;
  uint64_t end_ = 0;  // the first step that it does not have
  uint64_t variant_ = 0;
  uint64_t created_ = 0, deleted_ = 0;
  std::vector<uint64_t> deleted_since_;  // the snapshot, by table
};

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_CHECKPOINTS_H_
