// Restoring and checking a checkpoint, against the disk's sequential read rate.
//
// make      folder rows dim optimizer [hashed]: writes a checkpoint of a table, all of whose rows
//           have a record; the bytes that count, and all bytes
// read      folder: reads each parameter file of the folder as `dd iflag=direct bs=4M` does
// restore   folder: restores the newest checkpoint into an engine of its own, which is then closed
// check     folder: what frugal-fsck does
//
// The last three return seconds. They take turns within a run, and none leaves bytes of the folder
// in the system's cache. Restoring has no C interface of its own that this measures around: it is
// called from inside.
#include <dirent.h>

#include "engine/engine.h"
#include "format/folder_check.h"
#include "frugal.h"
#include "harness.h"

namespace bench {
namespace {

void Need(int32_t status) {
  if (status == FRUGAL_OK) return;
  throw std::runtime_error(std::string(frugal_status_name(status)) + ": " +
                           frugal::recorded_message());
}

// An engine, from inside.
class Opened {
 public:
  Opened() {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.seed = 7;
    Need(frugal_open(&config, &handle_));
  }
  ~Opened() { frugal_close(handle_); }
  frugal_engine* handle() const { return handle_; }
  frugal::Engine& inside() const {
    return *static_cast<frugal::Engine*>(frugal::object_of<frugal::Session>(handle_).get());
  }

 private:
  frugal_engine* handle_ = nullptr;
};

class Silent : public frugal::FolderReport {
 public:
  void found(const frugal::FolderFinding& finding) override {
    throw std::runtime_error(finding.line().c_str());
  }
};

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    const std::string folder = p.Str("folder");
    if (command == "make") return Make(folder, p);
    if (command == "read") return Timed([&] { return Read(folder); });
    if (command == "restore") return Timed([&] { return Restore(folder); });
    if (command == "check") return Timed([&] { return Check(folder); });
    throw std::runtime_error("unknown command " + command);
  }

 private:
  template <class Of>
  static Metrics Timed(Of of) {
    const int64_t start = NowNs(), cpu = CpuNs();
    Metrics metrics = of();
    // What ends after the call does, as an engine that is closed, has taken its own time.
    if (metrics.empty() || metrics[0].first != "seconds")
      metrics.insert(metrics.begin(), {"seconds", static_cast<double>(NowNs() - start) * 1e-9});
    metrics.push_back({"cpu_seconds", static_cast<double>(CpuNs() - cpu) * 1e-9});
    return metrics;
  }

  static Metrics Make(const std::string& folder, const Params& p) {
    const auto rows = static_cast<uint64_t>(p.Int("rows", 10000000));
    const bool hashed = p.Int("hashed", 0) != 0;
    Opened engine;
    Need(engine.inside().open_folder(folder.c_str(), 1));
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "rows";
    config.key_space = hashed ? FRUGAL_HASHED : FRUGAL_DENSE;
    config.rows = rows;
    config.dim = static_cast<uint32_t>(p.Int("dim", 32));
    config.init = FRUGAL_INIT_UNIFORM;
    config.init_a = -0.1f;
    config.init_b = 0.1f;
    config.optimizer.kind = p.Str("optimizer") == "adam" ? FRUGAL_ADAM : FRUGAL_ROWWISE_ADAGRAD;
    config.optimizer.lr = 0.01f;
    frugal_table* table = nullptr;
    Need(frugal_table_create(engine.handle(), &config, &table));
    frugal_table_info info{};
    info.struct_size = sizeof info;
    Need(frugal_table_describe(table, &info));
    constexpr uint64_t kAtOnce = 4096;
    const size_t floats = config.dim + info.state_floats;
    std::vector<float> values(kAtOnce * floats);
    std::vector<uint64_t> keys(kAtOnce);
    for (uint64_t from = 0; from < rows; from += kAtOnce) {
      const uint64_t n = std::min(kAtOnce, rows - from);
      for (uint64_t i = 0; i < n; ++i) keys[i] = hashed ? Batches::HashedKey(from + i) : from + i;
      for (size_t i = 0; i < n * floats; ++i)
        values[i] = static_cast<float>((from * floats + i) % 1000003) * 1e-6f;
      Need(frugal_put(table, keys.data(), n, FRUGAL_WITH_STATE, values.data(), 0));
    }
    uint64_t sequence = 0;
    Need(engine.inside().checkpoints().request({}, &sequence));
    Need(engine.inside().checkpoints().wait(sequence, UINT64_MAX, nullptr));
    double bytes = 0, live = 0;
    std::shared_ptr<frugal::Folder> opened;
    Need(frugal::Folder::open(folder.c_str(), frugal::Folder::Use::kRead, &opened));
    frugal::Manifest m;
    frugal::File held;
    Need(frugal::read_manifest(*opened, sequence, &m, &held));
    for (const frugal::ManifestTable& t : m.tables)
      for (const frugal::ManifestFile& f : t.files) {
        bytes += static_cast<double>(f.info.length);
        live +=
            static_cast<double>(f.live * (t.format.record_bytes() + sizeof(frugal::ColumnEntry)));
      }
    return {{"live_bytes", live}, {"bytes", bytes}};
  }

  static Metrics Read(const std::string& folder) {
    constexpr size_t kBytes = size_t{4} << 20;
    const HugeArray<char> memory(kBytes);
    std::vector<std::string> names;
    DIR* const dir = opendir(folder.c_str());
    if (!dir) throw std::runtime_error("cannot open " + folder);
    while (const dirent* entry = readdir(dir))
      if (std::string(entry->d_name).ends_with(".rows")) names.push_back(entry->d_name);
    closedir(dir);
    double bytes = 0;
    for (const std::string& name : names) {
      const int fd = open((folder + "/" + name).c_str(), O_RDONLY | O_DIRECT);
      if (fd < 0) throw std::runtime_error("cannot open " + name);
      ssize_t n;
      while ((n = ::read(fd, memory.data(), kBytes)) > 0) bytes += static_cast<double>(n);
      close(fd);
      if (n < 0) throw std::runtime_error("cannot read " + name);
    }
    return {{"bytes", bytes}};
  }

  static Metrics Restore(const std::string& folder) {
    Opened engine;
    const int64_t start = NowNs();
    Need(engine.inside().restore(folder.c_str(), 0, nullptr));
    return {{"seconds", static_cast<double>(NowNs() - start) * 1e-9}};
  }

  static Metrics Check(const std::string& folder) {
    Silent report;
    frugal::FolderCounts counts;
    Need(frugal::check_folder(folder.c_str(), frugal::FolderRead::kAll, &report, &counts));
    return {{"bytes", static_cast<double>(counts.bytes)}};
  }
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    frugal::begin_call();
    return worker.Handle(command, params);
  });
}
