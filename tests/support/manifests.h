// Random manifests, and whether two of them say the same.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>

#include "format/manifest.h"
#include "support/random.h"

namespace frugal {

// All that a manifest says, byte by byte. It names no field of the structs of frugal.h, so it also
// has one that an encoder has forgotten.
class ManifestText {
 public:
  static std::string of(const Manifest& m) {
    ManifestText t;
    t.put(m);
    return t.text_;
  }

 private:
  void bytes(const void* from, size_t size) {
    constexpr char kDigits[] = "0123456789abcdef";
    for (size_t i = 0; i < size; ++i) {
      const auto byte = static_cast<const unsigned char*>(from)[i];
      text_ += kDigits[byte >> 4];
      text_ += kDigits[byte & 15];
    }
    text_ += ' ';
  }
  template <class T>
  void number(const T& x) {
    static_assert(std::is_arithmetic_v<T>);
    bytes(&x, sizeof x);
  }
  void put(const String& s) {
    bytes(s.data(), s.size());
    text_ += '\n';
  }
  void put(const frugal_optimizer& o) {
    bytes(&o, offsetof(frugal_optimizer, flags) + sizeof o.flags);
  }
  void put(const ManifestTable& t) {
    text_ += "\ntable ";
    number(t.number);
    put(t.name);
    const auto* config = reinterpret_cast<const char*>(&t.config);
    constexpr size_t kFrom = offsetof(frugal_table_config, key_space);
    number(t.config.struct_size);
    bytes(config + kFrom, offsetof(frugal_table_config, optimizer) - kFrom);
    put(t.config.optimizer);
    put(t.optimizer);
    number(t.has_state);
    bytes(&t.format, sizeof t.format);
    number(t.live_rows);
    for (const LaterOptimizer& l : t.later) {
      text_ += "\nlater ";
      number(l.first_step);
      put(l.optimizer);
    }
    for (const ManifestFile& f : t.files) {
      text_ += "\nfile ";
      bytes(&f.info, sizeof f.info);
      number(f.live);
    }
  }
  void put(const Manifest& m) {
    number(m.sequence);
    number(m.step);
    number(m.seed);
    number(m.world_size);
    put(m.name);
    number(m.created);
    number(m.next_table);
    number(m.next_file);
    number(m.blob_bytes);
    for (const ManifestTable& t : m.tables) put(t);
    for (const ManifestBlob& b : m.blobs) {
      text_ += "\nblob ";
      number(b.rank);
      number(b.at);
      number(b.bytes);
      number(b.checksum);
    }
  }
  std::string text_;
};

// A manifest that an engine could write. `most` bounds its lists.
class RandomManifest : Random {
 public:
  explicit RandomManifest(uint64_t seed, uint64_t most = 5) : Random(seed), most_(most) {}

  Manifest operator()(uint64_t sequence) {
    auto& draw = *static_cast<Random*>(this);
    Manifest m;
    m.sequence = sequence;
    m.step = one_in(6) ? kNoStepYet : one_in(8) ? UINT64_MAX - 70 : below(100'000);
    m.seed = draw();
    m.world_size = static_cast<uint32_t>(1 + (one_in(5) ? below(4096) : below(4)));
    m.name = name(one_in(2) ? 0 : below(kMostCheckpointName + 1));
    m.created = draw();
    const uint64_t tables = below(most_ + 1);
    for (uint64_t i = 0; i < tables; ++i) {
      m.next_table += one_in(2) ? 0 : below(1000);
      m.tables.push_back(table(m.next_table++, i, &m));
    }
    m.next_table += below(3);
    m.next_file += below(3);
    for (uint32_t rank = 0; rank < m.world_size && m.blobs.size() < most_; ++rank) {
      if (one_in(3)) continue;
      ManifestBlob b;
      b.rank = rank;
      b.at = m.blob_bytes;
      b.bytes = one_in(4) ? 0 : below(uint64_t{1} << 40);
      b.checksum = draw();
      m.blob_bytes += b.bytes;
      m.blobs.push_back(b);
    }
    return m;
  }

 private:
  String name(uint64_t length) {
    String s;
    while (s.size() < length) {
      const char c = static_cast<char>(1 + below(255));
      s += c == '/' ? '.' : c;
    }
    return s;
  }

  float number() {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>((*static_cast<Random*>(this))()));
    return std::isfinite(x) ? x : -0.0f;
  }

  frugal_optimizer optimizer(int32_t kind) {
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = kind;
    for (float* f :
         {&o.lr, &o.eps, &o.momentum, &o.dampening, &o.beta1, &o.beta2, &o.rho, &o.ftrl_lambda1,
          &o.ftrl_lambda2, &o.ftrl_beta, &o.clip_norm, &o.initial_accumulator, &o.weight_decay,
          &o.weight_bound, &o.clip_value, &o.weight_decay_l2, &o.grad_scale})
      *f = number();
    o.flags = static_cast<uint32_t>(below(16));
    return o;
  }
  int32_t kind() { return static_cast<int32_t>(below(FRUGAL_FTRL + 1)); }

  ManifestTable table(uint64_t number_of, uint64_t index, Manifest* m) {
    auto& draw = *static_cast<Random*>(this);
    ManifestTable t;
    t.number = number_of;
    t.name = name(1 + below(one_in(9) ? 254 : 20));
    t.name[0] = static_cast<char>('a' + index);  // unlike the others
    frugal_table_config& c = t.config;
    c.key_space = static_cast<int32_t>(below(2));
    c.rows = one_in(5) ? UINT32_MAX - 1 : 1 + below(10'000'000);
    c.dim = static_cast<uint32_t>(one_in(8) ? 65536 : 1 + below(300));
    c.init = static_cast<int32_t>(below(FRUGAL_INIT_XAVIER + 1));
    c.init_a = number();
    c.init_b = number();
    c.nan_policy = static_cast<int32_t>(below(3));
    c.flags = c.key_space == FRUGAL_DENSE ? static_cast<uint32_t>(below(2)) : 0;
    c.optimizer = optimizer(kind());
    t.optimizer = optimizer(kind());
    uint64_t step = m->step == kNoStepYet ? 0 : m->step + 1;
    for (uint64_t n = below(most_ + 1); n > 0 && step < UINT64_MAX - 66; --n) {
      step += step < UINT64_MAX - 1000 ? 1 + below(100) : 1;
      t.later.push_back({step, optimizer(t.optimizer.kind)});
      t.later.back().optimizer.initial_accumulator = t.optimizer.initial_accumulator;
    }
    t.has_state = one_in(2);
    t.format = RowFormat::of(c.dim, ElementType::kFloat32, t.optimizer.kind);
    uint64_t records = 0;
    for (uint64_t n = below(most_ + 1); n > 0; --n) {
      m->next_file += below(3);
      ManifestFile f;
      f.info.number = m->next_file++;
      f.info.table = t.number;
      f.info.sequence = 1 + below(m->sequence + 1);
      f.info.entries = one_in(5) ? kMostRecords : below(5000);
      f.info.records = below(f.info.entries + 1);
      const uint64_t bytes = f.info.records * t.format.record_bytes();
      f.info.length = kFileBlock + (bytes + kFileBlock - 1) / kFileBlock * kFileBlock +
                      column_bytes(f.info.entries);
      f.info.checksum = draw();
      f.live = below(f.info.records + 1);
      records += f.info.records;
      t.files.push_back(f);
    }
    t.live_rows = below(std::min(records, c.rows) + 1);
    return t;
  }

  const uint64_t most_;
};

// Gives a file's envelope the checksums of what follows.
inline void seal_manifest(Vector<uint64_t>* words) {
  ManifestEnvelope e;
  std::memcpy(&e, words->data(), sizeof e);
  const size_t bytes = words->size() * sizeof(uint64_t) - sizeof e;
  e.message_bytes = bytes;
  e.message_sum = checksum(words->data() + sizeof e / sizeof(uint64_t), bytes, e.sequence);
  e.envelope_sum = checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0);
  std::memcpy(words->data(), &e, sizeof e);
}

}  // namespace frugal
