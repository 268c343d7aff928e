// Which writes the host and the device see: tries the orderings that the engine relies on
// (docs/cuda.md "When the host may touch what") with its own kernels.
//
//     gpu_litmus --device cuda:0 [--rounds N] [--seconds S] [--seed N] [--results FILE] [--broken]
//         [--no-readers]
//     gpu_litmus --device cuda:0 --info       describes the device in a line of JSON
//
// In a round one side writes a row of 16 bytes and the other side reads it, in the order under
// test. A launch has many rows. Rows under test have even places, with copies the middle ones
// of 16. The other rows, in the same 128-byte lines, are written all the while: by the other side,
// or by a third stream if both sides are the device. They must keep those writes. Other kernels
// meanwhile read what the host writes for kernels, so that the lines are in the device's caches;
// their results do not matter.
//
// Every value is a stamp that grows from launch to launch. An older stamp is a stale read, a newer
// one a write that overtook a read. A mode passes when it has made all N rounds and none was bad. A
// mode that ran out of its seconds has not passed.
//
// --broken takes each ordering away, to show that its loss would be found: then every mode has to
// find stale reads. --no-readers leaves the other kernels out, since they are data races, which
// ThreadSanitizer reports.
#include <atomic>
#include <functional>
#include <thread>

#include "common.h"
#include "device/ops/shapes.h"

namespace gpu_tools {
namespace {

using frugal::device::FillArgs;
using frugal::device::GatherArgs;
using frugal::device::StageArgs;

constexpr uint32_t kPlaces = 1024;  // of 16 bytes; the even ones are under test
constexpr uint32_t kTested = kPlaces / 2;
constexpr uint32_t kMostRows = 32;  // of a launch
constexpr uint32_t kChain = 8;      // launches between two waits of the host
constexpr uint32_t kDelayBytes = 1u << 20;
constexpr uint32_t kLongDelayBytes = 1u << 27;  // tens of microseconds of a GPU, more than a launch

struct alignas(16) Row {
  uint32_t word[4];
};

Row RowOf(uint32_t stamp) { return {{stamp * 4, stamp * 4 + 1, stamp * 4 + 2, stamp * 4 + 3}}; }

// Both sides write this memory concurrently, so it is read and written word by word, as it is
// there.
void Write(Row* to, const Row& row) {
  for (int i = 0; i < 4; ++i) __atomic_store_n(&to->word[i], row.word[i], __ATOMIC_RELAXED);
}
Row Read(const Row* from) {
  Row row;
  for (int i = 0; i < 4; ++i) row.word[i] = __atomic_load_n(&from->word[i], __ATOMIC_RELAXED);
  return row;
}

struct Count {
  uint64_t rounds = 0, launches = 0;
  uint64_t stale = 0;  // older than what was written before the read
  uint64_t early = 0;  // newer: written after the read
  uint64_t wrong = 0;  // another place's value, or garbage
  uint64_t lost = 0;   // lost writes of neighbours
  uint64_t bad() const { return stale + early + wrong + lost; }

  void Check(const Row& row, uint32_t stamp) {
    ++rounds;
    bool older = false, newer = false;
    for (uint32_t i = 0; i < 4; ++i) {
      if (row.word[i] % 4 != i) {
        ++wrong;
        return;
      }
      older |= row.word[i] / 4 < stamp;
      newer |= row.word[i] / 4 > stamp;
    }
    if (older)
      ++stale;
    else if (newer)
      ++early;
  }
};

// Where copies are tested: runs of kRunRows rows across the border of two lines.
constexpr uint32_t kBlockPlaces = 16, kRunFrom = 3, kRunRows = 10;
bool IsOdd(uint32_t place) { return place % 2 == 1; }
bool IsBesideRuns(uint32_t place) { return place % kBlockPlaces - kRunFrom >= kRunRows; }

// A host thread that repeatedly writes its places of an area, and checks that nothing else does.
class Neighbour {
 public:
  explicit Neighbour(Row* area, bool (*has)(uint32_t) = IsOdd) : area_(area) {
    for (uint32_t p = 0; p < kPlaces; ++p)
      if (has(p)) places_.push_back(p);
    thread_ = std::thread([this] { Run(); });
  }
  uint64_t Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return lost_;
  }
  ~Neighbour() { Stop(); }

 private:
  void Run() {
    std::vector<Row> last(kPlaces);
    for (uint32_t p : places_) last[p] = Read(&area_[p]);
    auto check = [&](uint32_t p) {
      const Row now = Read(&area_[p]);
      lost_ += memcmp(&now, &last[p], sizeof now) != 0;
    };
    uint32_t stamp = 0x20000000;
    while (!stop_) {
      ++stamp;
      for (uint32_t p : places_) {
        if (stop_) break;
        check(p);
        last[p] = RowOf(stamp);
        Write(&area_[p], last[p]);
      }
      std::this_thread::yield();  // there may be only one core
    }
    for (uint32_t p : places_) check(p);
  }

  Row* area_;
  std::vector<uint32_t> places_;
  uint64_t lost_ = 0;  // read after the thread has ended
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Settings {
  uint64_t rounds;
  double seconds;
  bool broken, readers;
  uint32_t delay_bytes;
};

class Litmus {
 public:
  Litmus(std::shared_ptr<Runtime> runtime, const Settings& settings, uint64_t seed)
      : runtime_(std::move(runtime)),
        settings_(settings),
        random_(seed),
        host_(runtime_, kPlaces),
        hosts_(runtime_, kPlaces),
        packed_(runtime_, kChain * kMostRows),
        back_(runtime_, kChain * kMostRows),
        lists_(runtime_, kChain * 2 * kMostRows),
        identity_(runtime_, kPlaces + 1),
        device_(runtime_, kPlaces),
        given_(runtime_, kChain * kMostRows),
        ignored_(runtime_, kPlaces),
        delay_(runtime_, settings.delay_bytes),
        own_a_(runtime_),
        own_b_(runtime_),
        noise_(runtime_),
        default_(runtime_, false) {
    for (uint32_t i = 0; i <= kPlaces; ++i) identity_[i] = i;
    for (uint32_t i = 0; i < kPlaces; ++i) host_[i] = hosts_[i] = RowOf(0);
    for (uint32_t i = 0; i < back_.size(); ++i) back_[i] = RowOf(0);
  }

  // The host writes rows, then launches a kernel that reads them; it writes them again when the
  // kernel's event has passed.
  Count HostToDevice() {
    Neighbour neighbour(host_.data());
    Count count = Rounds([&](Count* c) {
      Lane& s = AnyStream();
      const uint32_t n = Choose(0), stamp = ++stamp_;
      OthersRead(host_);
      HostDelay();
      auto write = [&] {
        for (uint32_t i = 0; i < n; ++i) Write(&host_[Place(0, i)], RowOf(stamp));
      };
      if (!settings_.broken) write();
      HostDelay();
      DeviceDelay(s);
      const Ptr<float> out = given_.at<float>();
      switch (random_.Below(3)) {
        case 0:
          Gather(s, 0, n, host_.seen<float>(), false, out, false);
          break;
        case 1:
          Stage(s, n, host_.seen<float>(), out);
          break;
        default:
          Fill(s, n, host_.seen<float>(), out);
      }
      s.Copy(back_.seen(), given_.at(), n * sizeof(Row));
      if (settings_.broken) {
        s.Wait();
        write();
      }
      s.Wait();
      for (uint32_t i = 0; i < n; ++i) c->Check(Read(&back_[i]), stamp);
      return 1u;
    });
    noise_.Wait();
    count.lost = neighbour.Stop();
    return count;
  }

  // A kernel writes host rows; the host reads them when its event has passed.
  Count DeviceToHost() {
    Neighbour neighbour(host_.data());
    Count count = Rounds([&](Count* c) {
      Lane& s = AnyStream();
      const uint32_t n = Choose(0), stamp = ++stamp_;
      for (uint32_t i = 0; i < n; ++i) Write(&packed_[i], RowOf(stamp));
      s.Copy(given_.at(), packed_.seen(), n * sizeof(Row));
      DeviceDelay(s);
      Scatter(s, 0, n, given_.at<float>(), true, host_.seen<float>());
      HostDelay();
      if (!settings_.broken) s.Wait();
      for (uint32_t i = 0; i < n; ++i) c->Check(Read(&host_[Place(0, i)]), stamp);
      s.Wait();
      return 1u;
    });
    count.lost = neighbour.Stop();
    return count;
  }

  // A copy engine writes host memory; the host reads it when the event has passed.
  Count CopyToHost() {
    Neighbour neighbour(hosts_.data(), IsBesideRuns);
    Count count = Rounds([&](Count* c) {
      Lane& s = AnyStream();
      const uint32_t n = 1 + static_cast<uint32_t>(random_.Below(kMostRows)), stamp = ++stamp_;
      const auto block = static_cast<uint32_t>(random_.Below(kPlaces / kBlockPlaces));
      auto place = [&](uint32_t i) {
        return (block + i / kRunRows) * kBlockPlaces % kPlaces + kRunFrom + i % kRunRows;
      };
      for (uint32_t i = 0; i < n; ++i) Write(&packed_[i], RowOf(stamp));
      Gather(s, 0, n, packed_.seen<float>(), false, given_.at<float>(), true);
      DeviceDelay(s);
      for (uint32_t i = 0; i < n; i += kRunRows)
        s.Copy(hosts_.seen() + place(i), given_.at() + i, std::min(kRunRows, n - i) * sizeof(Row));
      HostDelay();
      if (!settings_.broken) s.Wait();
      for (uint32_t i = 0; i < n; ++i) c->Check(Read(&hosts_[place(i)]), stamp);
      s.Wait();
      return 1u;
    });
    count.lost = neighbour.Stop();
    return count;
  }

  // A kernel of one stream writes. A kernel of another stream waits for the first kernel's event,
  // then reads. The next write waits for the read. The host waits for neither.
  Count DeviceToDevice(bool in_host_memory) {
    std::unique_ptr<Neighbour> neighbour;
    if (in_host_memory) neighbour = std::make_unique<Neighbour>(host_.data());
    const Ptr<float> area = in_host_memory ? host_.seen<float>() : device_.at<float>();
    const uint32_t noise_stamp = 0x10000000;
    if (!in_host_memory) {
      for (uint32_t p = 0; p < kPlaces; ++p) hosts_[p] = RowOf(p % 2 ? noise_stamp : 0);
      default_.Copy(device_.at(), hosts_.seen(), device_.bytes());
      default_.Wait();
    }
    Count count = Rounds([&](Count* c) {
      Lane *a = &own_a_, *b = &own_b_;
      if (random_.Below(4) == 0) a = &default_;
      if (random_.Below(2) == 0) std::swap(a, b);
      const uint32_t depth = 1 + static_cast<uint32_t>(random_.Below(kChain));
      uint32_t n[kChain], stamp[kChain];
      for (uint32_t d = 0; d < depth; ++d) {
        n[d] = Choose(d);
        stamp[d] = ++stamp_;
        for (uint32_t i = 0; i < n[d]; ++i) Write(&packed_[d * kMostRows + i], RowOf(stamp[d]));
      }
      // A third stream writes the neighbours on the device.
      if (!in_host_memory) Neighbours(noise_, area, noise_stamp);
      for (uint32_t d = 0; d < depth; ++d) {
        DeviceDelay(*a);
        Scatter(*a, d, n[d], packed_.seen<float>() + d * kMostRows * 4, false, area);
        if (!settings_.broken) b->After(a->Mark());
        DeviceDelay(*b);
        Gather(*b, d, n[d], area, !in_host_memory, back_.seen<float>() + d * kMostRows * 4, false);
        if (!settings_.broken) a->After(b->Mark());
        HostDelay();
      }
      a->Wait();
      b->Wait();
      for (uint32_t d = 0; d < depth; ++d)
        for (uint32_t i = 0; i < n[d]; ++i) c->Check(Read(&back_[d * kMostRows + i]), stamp[d]);
      return depth;
    });
    if (neighbour) {
      count.lost = neighbour->Stop();
    } else {
      noise_.Wait();
      default_.Copy(hosts_.seen(), device_.at(), device_.bytes());
      default_.Wait();
      const Row expected = RowOf(noise_stamp);
      for (uint32_t p = 1; p < kPlaces; p += 2)
        count.lost += memcmp(&hosts_[p], &expected, sizeof expected) != 0;
    }
    return count;
  }

  // The way of a row through a step: host row, device memory, rank gradients in host memory, host
  // row. Each step adds 1 to the value that it has read, so a lost write stays lost.
  Count RoundTrip() {
    Neighbour rows(host_.data()), sums(hosts_.data());
    const uint32_t from = ++stamp_;
    std::vector<uint32_t> expected(kPlaces, from);
    for (uint32_t p = 0; p < kPlaces; p += 2) Write(&host_[p], RowOf(from));
    Count count = Rounds([&](Count* c) {
      Lane& s = AnyStream();
      const uint32_t n = Choose(0);
      HostDelay();
      DeviceDelay(s);
      Gather(s, 0, n, host_.seen<float>(), false, given_.at<float>(), false);
      DeviceDelay(s);
      Scatter(s, 0, n, given_.at<float>(), true, hosts_.seen<float>());
      if (!settings_.broken) s.Wait();
      OthersRead(host_);
      HostDelay();
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t p = Place(0, i);
        const Row row = Read(&hosts_[p]);
        c->Check(row, expected[p]);
        // Continues with the value that was read, so an error is counted once.
        expected[p] = row.word[0] / 4 + 1;
        Write(&host_[p], RowOf(expected[p]));
        stamp_ = std::max(stamp_, expected[p]);
      }
      s.Wait();
      return 1u;
    });
    noise_.Wait();
    count.lost = rows.Stop() + sums.Stop();
    return count;
  }

 private:
  Count Rounds(const std::function<uint32_t(Count*)>& round) {
    Count count;
    const int64_t end = bench::NowNs() + static_cast<int64_t>(settings_.seconds * 1e9);
    while (count.rounds < settings_.rounds && bench::NowNs() < end) count.launches += round(&count);
    return count;
  }

  Lane& AnyStream() { return random_.Below(4) == 0 ? default_ : own_a_; }

  // Even places of launch `d` of a chain, each once.
  uint32_t Choose(uint32_t d) {
    const uint32_t n = 1 + static_cast<uint32_t>(random_.Below(kMostRows));
    const auto start = static_cast<uint32_t>(random_.Below(kTested));
    const auto step = static_cast<uint32_t>(random_.Below(kTested / 2)) * 2 + 1;
    uint32_t* places = &lists_[d * 2 * kMostRows];
    for (uint32_t i = 0; i < n; ++i) {
      places[i] = 2 * ((start + i * step) % kTested);
      places[kMostRows + i] = frugal::device::Source::cache_slot(places[i]).word;
    }
    return n;
  }
  uint32_t Place(uint32_t d, uint32_t i) const { return lists_[d * 2 * kMostRows + i]; }
  Ptr<uint32_t> Places(uint32_t d) const { return lists_.seen() + d * 2 * kMostRows; }

  void HostDelay() {
    if (random_.Below(2) == 0) bench::WaitUntilNs(bench::NowNs() + random_.Below(10'000));
  }
  void DeviceDelay(Lane& s) {
    if (random_.Below(3) == 0)
      Check(runtime_->fill(delay_.raw(), 1, 1 + random_.Below(settings_.delay_bytes), s.stream()),
            "a delay");
  }

  frugal::device::Extent extent() {
    // Few or many blocks, so that one processor reads the rows, or several.
    return {.processors = 8, .link_blocks = 4, .threads = random_.Below(2) ? 32u : 256u};
  }

  // Rows at the chosen places (`packed`: one after the other) to `out`, one after the other.
  void Gather(Lane& s, uint32_t d, uint32_t n, Ptr<float> from, bool device, Ptr<float> out,
              bool packed) {
    GatherArgs a{};
    a.part.slots = packed ? identity_.seen() : Places(d);
    a.part.start = a.part.positions = identity_.seen();
    Launch(s, &a, n, from, device, packed ? identity_.seen() : Places(d) + kMostRows, out);
  }
  // Rows one after the other to the chosen places of `out`.
  void Scatter(Lane& s, uint32_t d, uint32_t n, Ptr<float> from, bool device, Ptr<float> out) {
    if (device) {
      for (uint32_t i = 0; i < n; ++i)
        lists_[d * 2 * kMostRows + kMostRows + i] = frugal::device::Source::cache_slot(i).word;
    }
    GatherArgs a{};
    a.part.slots = a.part.start = identity_.seen();
    a.part.positions = Places(d);
    Launch(s, &a, n, from, device, Places(d) + kMostRows, out);
  }
  void Launch(Lane& s, GatherArgs* a, uint32_t n, Ptr<float> from, bool device,
              Ptr<uint32_t> source, Ptr<float> out) {
    a->part.distinct = n;
    (device ? a->cached_rows : a->host) = {from, 4};
    (device ? a->hbm_items : a->host_items) = n;
    if (device) a->source = {source.address};
    a->dim = 4;
    a->out = out;
    a->out_stride = sizeof(Row);
    const Shape shape = frugal::device::gather_shape(a, extent());
    s.Launch(Kernel::gather_rows, shape, *a);
  }
  void Stage(Lane& s, uint32_t n, Ptr<float> from, Ptr<float> out) {
    StageArgs a{};
    a.part.slots = Places(0);
    a.part.distinct = a.count = n;
    a.host = {from, 4};
    a.staged = {out, 4};
    a.dim = 4;
    s.Launch(Kernel::stage_rows, frugal::device::stage_shape(a, extent()), a);
  }
  void Fill(Lane& s, uint32_t n, Ptr<float> from, Ptr<float> out) {
    FillArgs a{};
    a.host = {from, 4};
    a.cached_rows = {out, 4};
    a.slots = Places(0);
    a.to = identity_.seen();
    a.count = n;
    a.dim = 4;
    s.Launch(Kernel::fill_lines, frugal::device::fill_shape(a, extent()), a);
  }
  // A kernel that reads a whole area while it is written, as other trainers on the device would.
  void OthersRead(const Pinned<Row>& area) {
    if (settings_.readers)
      Gather(noise_, 0, kPlaces, area.seen<float>(), false, ignored_.at<float>(), true);
  }
  // Writes the odd places.
  void Neighbours(Lane& s, Ptr<float> area, uint32_t stamp) {
    if (!odd_.size_is(kTested)) {
      odd_.places = Pinned<uint32_t>(runtime_, kTested);
      odd_.rows = Pinned<Row>(runtime_, kTested);
      for (uint32_t i = 0; i < kTested; ++i) {
        odd_.places[i] = 2 * i + 1;
        odd_.rows[i] = RowOf(stamp);
      }
    }
    GatherArgs a{};
    a.part.slots = a.part.start = identity_.seen();
    a.part.positions = odd_.places.seen();
    Launch(s, &a, kTested, odd_.rows.seen<float>(), false, {}, area);
  }

  std::shared_ptr<Runtime> runtime_;
  Settings settings_;
  bench::Random random_;
  uint32_t stamp_ = 0;
  Pinned<Row> host_, hosts_;   // areas with places
  Pinned<Row> packed_, back_;  // contiguous rows
  Pinned<uint32_t> lists_;     // for each launch of a chain: places, sources
  Pinned<uint32_t> identity_;
  OnDevice<Row> device_, given_, ignored_;
  OnDevice<char> delay_;
  struct {
    Pinned<uint32_t> places;
    Pinned<Row> rows;
    bool size_is(uint32_t n) const { return places.data() != nullptr && places.size() == n; }
  } odd_;
  Lane own_a_, own_b_, noise_, default_;
};

int Main(int argc, char** argv) {
  Options options(argc, argv);
  const std::string device = options.Str("--device", "sim:0");
  Settings settings{};
  settings.rounds = static_cast<uint64_t>(options.Num("--rounds", 1'000'000));
  settings.seconds = options.Num("--seconds", 25);
  settings.broken = options.Flag("--broken");
  settings.readers = !options.Flag("--no-readers");
  // Unordered work has to be out of order, also on a GPU that starts kernels fast.
  settings.delay_bytes =
      settings.broken && device.starts_with("cuda:") ? kLongDelayBytes : kDelayBytes;
  const auto seed = static_cast<uint64_t>(options.Num("--seed", 1));
  const bool info = options.Flag("--info");
  Results results(options.Str("--results", ""));
  options.NoOthers();
  if (settings.rounds == 0) throw std::runtime_error("no rounds");

  std::shared_ptr<Runtime> runtime;
  Check(frugal::device::open_runtime(device.c_str(), &runtime), device.c_str());
  if (info) {
    const frugal::device::DeviceInfo& d = runtime->info();
    results.Line(Json()
                     .Set("gpu", d.name)
                     .Count("compute", d.compute)
                     .Count("processors", d.processors)
                     .Count("memory_bytes", d.memory_bytes));
    return 0;
  }
  Litmus litmus(runtime, settings, seed);
  const struct {
    const char* name;
    std::function<Count()> run;
  } modes[] = {
      {"host_to_device", [&] { return litmus.HostToDevice(); }},
      {"device_to_host", [&] { return litmus.DeviceToHost(); }},
      {"copy_to_host", [&] { return litmus.CopyToHost(); }},
      {"device_to_device", [&] { return litmus.DeviceToDevice(false); }},
      {"device_to_device_in_host_memory", [&] { return litmus.DeviceToDevice(true); }},
      {"round_trip", [&] { return litmus.RoundTrip(); }},
  };
  Count all;
  uint64_t failed = 0;
  for (const auto& mode : modes) {
    const int64_t start = bench::NowNs();
    const Count c = mode.run();
    const bool met = settings.broken ? c.stale > 0 : c.bad() == 0 && c.rounds >= settings.rounds;
    results.Line(Json()
                     .Set("case", settings.broken ? "litmus_broken" : "litmus")
                     .Set("mode", mode.name)
                     .Count("rounds", c.rounds)
                     .Count("launches", c.launches)
                     .Count("stale", c.stale)
                     .Count("early", c.early)
                     .Count("wrong", c.wrong)
                     .Count("neighbours_lost", c.lost)
                     .Set("seconds", static_cast<double>(bench::NowNs() - start) * 1e-9)
                     .Set("aim", settings.broken
                                     ? "stale reads are found"
                                     : std::to_string(settings.rounds) + " rounds, 0 stale")
                     .Raw("met", met ? "true" : "false"));
    failed += !met;
    all.rounds += c.rounds;
    all.stale += c.stale;
  }
  printf("litmus: %llu rounds, %llu stale, %llu of %zu modes failed\n",
         static_cast<unsigned long long>(all.rounds), static_cast<unsigned long long>(all.stale),
         static_cast<unsigned long long>(failed), std::size(modes));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gpu_tools

int main(int argc, char** argv) {
  try {
    return gpu_tools::Main(argc, argv);
  } catch (const std::exception& e) {
    fprintf(stderr, "gpu_litmus: %s\n", e.what());
    return 2;
  }
}
