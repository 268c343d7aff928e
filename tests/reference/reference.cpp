#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace frugal_reference {
namespace {

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

uint64_t Fnv(const char* name) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char* c = name; *c != 0; ++c) {
    h = (h ^ static_cast<unsigned char>(*c)) * 0x100000001b3u;
  }
  return h;
}

// The polynomial with coefficients c[0], c[1], ..., by Horner's rule from the highest.
template <size_t n>
double Polynomial(const double (&c)[n], double x) {
  double value = c[n - 1];
  for (size_t i = n - 1; i > 0; --i) value = value * x + c[i - 1];
  return value;
}

bool IsPadding(const Op& op, size_t i) { return op.padded && op.keys[i] == op.padding_key; }

bool HasNan(const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return true;
  }
  return false;
}

// Number of keys of a bag that are not padding.
size_t BagSize(const Op& op, size_t bag) {
  size_t n = 0;
  for (size_t i = op.offsets[bag]; i < op.offsets[bag + 1]; ++i) n += IsPadding(op, i) ? 0 : 1;
  return n;
}

}  // namespace

std::vector<float> Fold32(const std::vector<std::vector<float>>& terms) {
  std::vector<std::vector<float>> sums;
  for (size_t begin = 0; begin < terms.size(); begin += 32) {
    std::vector<float> sum = terms[begin];
    for (size_t i = begin + 1; i < std::min(begin + 32, terms.size()); ++i) {
      for (size_t c = 0; c < sum.size(); ++c) sum[c] = sum[c] + terms[i][c];
    }
    sums.push_back(std::move(sum));
  }
  while (sums.size() > 1) {
    std::vector<std::vector<float>> next;
    for (size_t i = 0; i + 1 < sums.size(); i += 2) {
      std::vector<float> sum = sums[i];
      for (size_t c = 0; c < sum.size(); ++c) sum[c] = sum[c] + sums[i + 1][c];
      next.push_back(std::move(sum));
    }
    if (sums.size() % 2 == 1) next.push_back(std::move(sums.back()));
    sums = std::move(next);
  }
  return sums.empty() ? std::vector<float>() : std::move(sums[0]);
}

float Sum16(const std::vector<float>& x) {
  float lane[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lane[i % 16] = lane[i % 16] + x[i];
  for (size_t width = 8; width >= 1; width /= 2) {
    for (size_t l = 0; l < width; ++l) lane[l] = lane[l] + lane[l + width];
  }
  return lane[0];
}

float Canonical(float x) {
  if (!std::isnan(x)) return x;
  const uint32_t bits = 0x7fc00000u;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

double PowBySquaring(double x, uint64_t t) {
  double r = 1;
  while (t != 0) {
    if (t & 1) r = r * x;
    x = x * x;
    t >>= 1;
  }
  return r;
}

double Ln(double x) {
  int e = 0;
  double m = std::frexp(x, &e);  // exact: only takes the number apart
  if (m < 0.70710678118654752) {
    m = 2 * m;
    e = e - 1;
  }
  const double t = (m - 1) / (m + 1);
  const double q = t * t;
  double s = 1.0 / 27;
  for (int k = 25; k >= 1; k -= 2) s = s * q + 1.0 / k;
  return (2 * t) * s + e * 0.69314718055994531;
}

double NormalQuantile(double p) {
  // Wichura's AS 241, PPND16.
  static const double a[] = {3.3871328727963666080e0,  1.3314166789178437745e+2,
                             1.9715909503065514427e+3, 1.3731693765509461125e+4,
                             4.5921953931549871457e+4, 6.7265770927008700853e+4,
                             3.3430575583588128105e+4, 2.5090809287301226727e+3};
  static const double b[] = {1.0,
                             4.2313330701600911252e+1,
                             6.8718700749205790830e+2,
                             5.3941960214247511077e+3,
                             2.1213794301586595867e+4,
                             3.9307895800092710610e+4,
                             2.8729085735721942674e+4,
                             5.2264952788528545610e+3};
  static const double c[] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                             5.76949722146069140550e0,  3.64784832476320460504e0,
                             1.27045825245236838258e0,  2.41780725177450611770e-1,
                             2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static const double d[] = {1.0,
                             2.05319162663775882187e0,
                             1.67638483018380384940e0,
                             6.89767334985100004550e-1,
                             1.48103976427480074590e-1,
                             1.51986665636164571966e-2,
                             5.47593808499534494600e-4,
                             1.05075007164441684324e-9};
  static const double e[] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                             1.78482653991729133580e0,  2.96560571828504891230e-1,
                             2.65321895265761230930e-2, 1.24266094738807843860e-3,
                             2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static const double f[] = {1.0,
                             5.99832206555887937690e-1,
                             1.36929880922735805310e-1,
                             1.48753612908506148525e-2,
                             7.86869131145613259100e-4,
                             1.84631831751005468180e-5,
                             1.42151175831644588870e-7,
                             2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return (q * Polynomial(a, r)) / Polynomial(b, r);
  }
  double r = q < 0 ? p : 1 - p;
  r = std::sqrt(-Ln(r));
  double z;
  if (r <= 5) {
    r = r - 1.6;
    z = Polynomial(c, r) / Polynomial(d, r);
  } else {
    r = r - 5;
    z = Polynomial(e, r) / Polynomial(f, r);
  }
  return q < 0 ? -z : z;
}

float InitialValue(const frugal_table_config& config, uint64_t seed, uint64_t key,
                   uint64_t column) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t table = Mix(seed + Fnv(config.name));
  const uint64_t row = Mix(table ^ Mix(key + golden));
  const uint64_t bits = Mix(row + (column + 1) * golden);
  const double u = static_cast<double>(bits >> 11) * 0x1p-53;
  const double p = static_cast<double>((bits >> 12) * 2 + 1) * 0x1p-53;
  const double a = config.init_a;
  const double b = config.init_b;
  switch (config.init) {
    case FRUGAL_INIT_UNIFORM:
      return static_cast<float>(a + (b - a) * u);
    case FRUGAL_INIT_XAVIER: {
      const double fan_in = b != 0 ? b : static_cast<double>(config.rows);
      const double x = a * std::sqrt(6 / (fan_in + config.dim));
      return static_cast<float>(-x + (x - -x) * u);
    }
    case FRUGAL_INIT_NORMAL:
      return static_cast<float>(a + b * NormalQuantile(p));
    case FRUGAL_INIT_TRUNCATED_NORMAL: {
      const double tail = 0.022750131948179195;
      return static_cast<float>(a + b * NormalQuantile(tail + p * (1 - 2 * tail)));
    }
    default:
      return static_cast<float>(a);
  }
}

size_t StateFloats(int32_t optimizer_kind, size_t dim) {
  switch (optimizer_kind) {
    case FRUGAL_MOMENTUM:
    case FRUGAL_ADAGRAD:
    case FRUGAL_RMSPROP:
      return dim;
    case FRUGAL_ROWWISE_ADAGRAD:
      return 1;
    case FRUGAL_ADAM:
    case FRUGAL_FTRL:
      return 2 * dim;
    default:
      return 0;
  }
}

bool ApplyUpdate(const frugal_optimizer& o, int32_t nan_policy, uint32_t world_size, uint64_t step,
                 std::vector<float> g, size_t dim, float* row) {
  if (o.flags & FRUGAL_OPT_MEAN_RANKS) {
    for (float& x : g) x = x / static_cast<float>(world_size);
  }
  for (float& x : g) x = x * o.grad_scale;
  if (nan_policy == FRUGAL_NAN_SKIP && HasNan(g.data(), dim)) return false;
  if (o.clip_value > 0) {
    const float c = o.clip_value;
    for (float& x : g) x = x > c ? c : (x < -c ? -c : x);
  }
  if (o.clip_norm > 0) {
    std::vector<float> squares(dim);
    for (size_t i = 0; i < dim; ++i) squares[i] = g[i] * g[i];
    const float norm = std::sqrt(Sum16(squares));
    if (norm > o.clip_norm) {
      const float factor = o.clip_norm / norm;
      for (float& x : g) x = x * factor;
    }
  }
  float* w = row;
  float* state = row + dim;
  if (o.weight_decay_l2 != 0) {
    for (size_t i = 0; i < dim; ++i) g[i] = g[i] + o.weight_decay_l2 * w[i];
  }

  switch (o.kind) {
    case FRUGAL_SGD:
      for (size_t i = 0; i < dim; ++i) w[i] = w[i] - o.lr * g[i];
      break;
    case FRUGAL_MOMENTUM: {
      const float rest = 1.0f - o.dampening;
      for (size_t i = 0; i < dim; ++i) {
        float& b = state[i];
        b = o.momentum * b + rest * g[i];
        const float d = (o.flags & FRUGAL_OPT_NESTEROV) ? g[i] + o.momentum * b : b;
        w[i] = w[i] - o.lr * d;
      }
      break;
    }
    case FRUGAL_ADAGRAD:
      for (size_t i = 0; i < dim; ++i) {
        float& a = state[i];
        a = a + g[i] * g[i];
        w[i] = w[i] - (o.lr * g[i]) / (std::sqrt(a) + o.eps);
      }
      break;
    case FRUGAL_ROWWISE_ADAGRAD: {
      std::vector<float> squares(dim);
      for (size_t i = 0; i < dim; ++i) squares[i] = g[i] * g[i];
      float& a = state[0];
      a = a + Sum16(squares) / static_cast<float>(dim);
      const float q = o.lr / (std::sqrt(a) + o.eps);
      for (size_t i = 0; i < dim; ++i) w[i] = w[i] - q * g[i];
      break;
    }
    case FRUGAL_ADAM: {
      const uint64_t t = step + 1;
      const float rest1 = 1.0f - o.beta1;
      const float rest2 = 1.0f - o.beta2;
      const double correction1 = 1 - PowBySquaring(o.beta1, t);
      const double correction2 = 1 - PowBySquaring(o.beta2, t);
      const float alpha =
          (o.flags & FRUGAL_OPT_NO_BIAS_CORRECTION)
              ? o.lr
              : static_cast<float>((static_cast<double>(o.lr) * std::sqrt(correction2)) /
                                   correction1);
      for (size_t i = 0; i < dim; ++i) {
        float& m = state[i];
        float& v = state[dim + i];
        m = o.beta1 * m + rest1 * g[i];
        v = o.beta2 * v + (rest2 * g[i]) * g[i];
        w[i] = w[i] - (alpha * m) / (std::sqrt(v) + o.eps);
      }
      break;
    }
    case FRUGAL_RMSPROP: {
      const float rest = 1.0f - o.rho;
      for (size_t i = 0; i < dim; ++i) {
        float& v = state[i];
        v = o.rho * v + (rest * g[i]) * g[i];
        w[i] = w[i] - (o.lr * g[i]) / (std::sqrt(v) + o.eps);
      }
      break;
    }
    case FRUGAL_FTRL:
      for (size_t i = 0; i < dim; ++i) {
        float& z = state[i];
        float& n = state[dim + i];
        const float n_new = n + g[i] * g[i];
        const float sigma = (std::sqrt(n_new) - std::sqrt(n)) / o.lr;
        z = (z + g[i]) - sigma * w[i];
        n = n_new;
        if (std::fabs(z) <= o.ftrl_lambda1) {
          w[i] = 0;
        } else {
          const float signed_lambda1 = z < 0 ? -o.ftrl_lambda1 : o.ftrl_lambda1;
          w[i] = (signed_lambda1 - z) / ((o.ftrl_beta + std::sqrt(n_new)) / o.lr + o.ftrl_lambda2);
        }
      }
      break;
    default:
      break;
  }

  if (o.weight_decay != 0) {
    const float factor = o.lr * o.weight_decay;
    for (size_t i = 0; i < dim; ++i) w[i] = w[i] - factor * w[i];
  }
  if (o.weight_bound > 0) {
    const float b = o.weight_bound;
    for (size_t i = 0; i < dim; ++i) w[i] = w[i] > b ? b : (w[i] < -b ? -b : w[i]);
  }
  const size_t floats = dim + StateFloats(o.kind, dim);
  for (size_t i = 0; i < floats; ++i) row[i] = Canonical(row[i]);
  return true;
}

size_t Reference::AddTable(const frugal_table_config& config) {
  Table table;
  table.name = config.name;
  table.config = config;
  table.state_floats = StateFloats(config.optimizer.kind, config.dim);
  table.schedule[0] = config.optimizer;
  tables_.push_back(std::move(table));
  // Tables may have moved; a config's name points into its own table.
  for (Table& t : tables_) t.config.name = t.name.c_str();
  return tables_.size() - 1;
}

void Reference::SetOptimizer(size_t table, uint64_t first_step, const frugal_optimizer& optimizer) {
  tables_[table].schedule[first_step] = optimizer;
}

const frugal_optimizer& Reference::OptimizerAt(size_t table, uint64_t step) const {
  return std::prev(tables_[table].schedule.upper_bound(step))->second;
}

std::vector<float> Reference::InitialRow(const Table& table, uint64_t key) const {
  const size_t dim = table.config.dim;
  std::vector<float> row(dim + table.state_floats, 0.0f);
  for (size_t c = 0; c < dim; ++c) {
    row[c] = Canonical(InitialValue(table.config, seed_, key, c));
  }
  const int32_t kind = table.config.optimizer.kind;
  const float start = Canonical(table.config.optimizer.initial_accumulator);
  if (kind == FRUGAL_ADAGRAD || kind == FRUGAL_ROWWISE_ADAGRAD) {
    std::fill(row.begin() + dim, row.end(), start);
  } else if (kind == FRUGAL_FTRL) {
    std::fill(row.begin() + 2 * dim, row.end(), start);
  }
  return row;
}

void Reference::CreateRow(uint64_t step, size_t t, uint64_t key) {
  Table& table = tables_[t];
  if (table.config.key_space == FRUGAL_DENSE) return;
  Row& row = table.rows[key];
  row.ever_touched = true;
  if (row.alive) {
    if (row.lives.back().from <= step + 1) return;
    // A step before the one that made the row wants it too: the row is then that step's.
    for (Birth& birth : births_) {
      if (birth.table == t && birth.key == key && step < birth.step) {
        birth.step = step;
        row.lives.back().from = step + 1;
      }
    }
    return;
  }
  row.alive = true;
  row.lives.push_back({step + 1, UINT64_MAX});
  births_.push_back({t, key, step});
}

void Reference::Create(uint64_t step, const Op& op) {
  for (size_t i = 0; i < op.count; ++i) {
    if (!IsPadding(op, i)) CreateRow(step, op.table, op.keys[i]);
  }
}

void Reference::Lookup(uint64_t step, const Op& op, float* out) const {
  const size_t dim = tables_[op.table].config.dim;
  if (op.pooling == FRUGAL_POOL_NONE) {
    for (size_t i = 0; i < op.count; ++i, out += dim) {
      std::fill(out, out + dim, 0.0f);
      if (IsPadding(op, i)) continue;
      const std::vector<float> row = RowAt(op.table, op.keys[i], step);
      std::copy(row.begin(), row.begin() + dim, out);
    }
    return;
  }
  for (size_t bag = 0; bag < op.bags; ++bag, out += dim) {
    std::fill(out, out + dim, 0.0f);
    std::vector<std::vector<float>> terms;
    for (size_t i = op.offsets[bag]; i < op.offsets[bag + 1]; ++i) {
      if (IsPadding(op, i)) continue;
      std::vector<float> term = RowAt(op.table, op.keys[i], step);
      term.resize(dim);
      if (op.weights != nullptr) {
        for (float& x : term) x = op.weights[i] * x;
      }
      terms.push_back(std::move(term));
    }
    if (terms.empty()) continue;
    const std::vector<float> sum = Fold32(terms);
    for (size_t c = 0; c < dim; ++c) {
      const float x =
          op.pooling == FRUGAL_POOL_MEAN ? sum[c] / static_cast<float>(terms.size()) : sum[c];
      out[c] = Canonical(x);
    }
  }
}

int32_t Reference::Push(uint32_t rank, uint64_t step, const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (tables_[op.table].config.nan_policy != FRUGAL_NAN_REJECT) continue;
    const size_t dim = tables_[op.table].config.dim;
    const bool pooled = op.pooling != FRUGAL_POOL_NONE;
    for (size_t i = 0; i < (pooled ? op.bags : op.count); ++i) {
      const bool counts = pooled ? BagSize(op, i) > 0 : !IsPadding(op, i);
      if (counts && HasNan(op.grads + i * dim, dim)) return FRUGAL_ERR_NAN;
    }
  }
  PendingStep& pending = pending_[step];
  pending.by_table.resize(tables_.size());
  for (const Op& op : ops) {
    const size_t dim = tables_[op.table].config.dim;
    auto& rows = pending.by_table[op.table];
    auto add = [&](size_t i, std::vector<float> term) {
      CreateRow(step, op.table, op.keys[i]);
      rows[op.keys[i]].by_rank[rank].push_back(std::move(term));
    };
    if (op.pooling == FRUGAL_POOL_NONE) {
      for (size_t i = 0; i < op.count; ++i) {
        if (IsPadding(op, i)) continue;
        add(i, std::vector<float>(op.grads + i * dim, op.grads + (i + 1) * dim));
      }
      continue;
    }
    for (size_t bag = 0; bag < op.bags; ++bag) {
      const float n = static_cast<float>(BagSize(op, bag));
      for (size_t i = op.offsets[bag]; i < op.offsets[bag + 1]; ++i) {
        if (IsPadding(op, i)) continue;
        std::vector<float> term(op.grads + bag * dim, op.grads + (bag + 1) * dim);
        for (float& x : term) {
          if (op.pooling == FRUGAL_POOL_MEAN) {
            x = x / n;
          } else if (op.weights != nullptr) {
            x = op.weights[i] * x;
          }
        }
        add(i, std::move(term));
      }
    }
  }
  return FRUGAL_OK;
}

void Reference::WeightGrads(uint64_t step, const Op& op, float* out) const {
  const size_t dim = tables_[op.table].config.dim;
  for (size_t bag = 0; bag < op.bags; ++bag) {
    for (size_t i = op.offsets[bag]; i < op.offsets[bag + 1]; ++i) {
      out[i] = 0;
      if (IsPadding(op, i)) continue;
      std::vector<float> products = RowAt(op.table, op.keys[i], step);
      products.resize(dim);
      for (size_t c = 0; c < dim; ++c) products[c] = products[c] * op.grads[bag * dim + c];
      out[i] = Sum16(products);
    }
  }
}

void Reference::Commit(uint64_t step, bool skip) {
  const auto found = pending_.find(step);
  if (found != pending_.end()) {
    for (size_t t = 0; t < found->second.by_table.size() && !skip; ++t) {
      Table& table = tables_[t];
      const size_t dim = table.config.dim;
      for (const auto& [key, pending] : found->second.by_table[t]) {
        std::vector<float> gradient;
        for (const auto& [rank, terms] : pending.by_rank) {  // ascending ranks
          const std::vector<float> sum = Fold32(terms);
          if (gradient.empty()) {
            gradient = sum;
          } else {
            for (size_t c = 0; c < dim; ++c) gradient[c] = gradient[c] + sum[c];
          }
        }
        std::vector<float> row = RowAt(t, key, step);
        if (ApplyUpdate(OptimizerAt(t, step), table.config.nan_policy, world_size_, step,
                        std::move(gradient), dim, row.data())) {
          AddVersion(&table, key, step + 1, /*absolute=*/false, std::move(row));
        }
      }
    }
    pending_.erase(found);
  }
  births_.erase(std::remove_if(births_.begin(), births_.end(),
                               [&](const Birth& birth) { return birth.step <= step; }),
                births_.end());
}

void Reference::Abort() {
  pending_.clear();
  for (const Birth& birth : births_) {
    Row& row = tables_[birth.table].rows[birth.key];
    row.alive = false;
    row.lives.pop_back();
  }
  births_.clear();
}

bool Reference::Get(size_t t, uint64_t key, std::vector<float>* row_out) const {
  const Table& table = tables_[t];
  *row_out = RowAt(t, key, UINT64_MAX);
  if (table.config.key_space == FRUGAL_DENSE) return true;
  const auto found = table.rows.find(key);
  return found != table.rows.end() && found->second.alive;
}

void Reference::Put(size_t t, uint64_t step, uint64_t key, bool with_state, const float* values) {
  Table& table = tables_[t];
  std::vector<float> row = InitialRow(table, key);
  const size_t floats = with_state ? row.size() : table.config.dim;
  for (size_t i = 0; i < floats; ++i) row[i] = Canonical(values[i]);
  AddVersion(&table, key, step, /*absolute=*/true, std::move(row));
  Row& entry = table.rows[key];
  if (!entry.alive) entry.lives.push_back({step, UINT64_MAX});
  entry.alive = true;
  entry.ever_touched = true;
}

bool Reference::Delete(size_t t, uint64_t step, uint64_t key) {
  Table& table = tables_[t];
  const bool dense = table.config.key_space == FRUGAL_DENSE;
  const auto found = table.rows.find(key);
  if (!dense && (found == table.rows.end() || !found->second.alive)) return false;
  AddVersion(&table, key, step, /*absolute=*/true, InitialRow(table, key));
  Row& entry = table.rows[key];
  if (!dense) {
    entry.alive = false;
    entry.lives.back().until = step;
  }
  return true;
}

std::vector<uint64_t> Reference::Keys(size_t t) const {
  const Table& table = tables_[t];
  std::vector<uint64_t> keys;
  if (table.config.key_space == FRUGAL_DENSE) {
    for (uint64_t key = 0; key < table.config.rows; ++key) keys.push_back(key);
    return keys;
  }
  for (const auto& [key, row] : table.rows) {
    if (row.alive) keys.push_back(key);
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

void Reference::AddVersion(Table* table, uint64_t key, uint64_t from, bool absolute,
                           std::vector<float> values) {
  Row& row = table->rows[key];
  if (!row.versions.empty() && row.versions.back().from == from) row.versions.pop_back();
  row.versions.push_back({from, absolute, std::move(values)});
}

std::vector<float> Reference::RowAt(size_t t, uint64_t key, uint64_t step) const {
  return VersionsAt(t, key, step, 0)[0];
}

std::vector<std::vector<float>> Reference::VersionsAt(size_t t, uint64_t key, uint64_t step,
                                                      uint64_t staleness) const {
  const Table& table = tables_[t];
  const uint64_t oldest_step = step >= staleness ? step - staleness : 0;
  std::vector<std::vector<float>> result;
  const auto found = table.rows.find(key);
  if (found != table.rows.end()) {
    const std::vector<Version>& versions = found->second.versions;
    for (size_t i = versions.size(); i > 0; --i) {
      const Version& version = versions[i - 1];
      if (version.from > step) continue;
      result.push_back(version.row);
      // This version is the one for t = oldest_step; older ones have been overwritten by then.
      if (version.absolute || version.from <= oldest_step) return result;
    }
  }
  result.push_back(InitialRow(table, key));
  return result;
}

Reference::Existence Reference::ExistsAt(size_t t, uint64_t key, uint64_t step,
                                         uint64_t staleness) const {
  const Table& table = tables_[t];
  if (table.config.key_space == FRUGAL_DENSE) return Existence::kYes;
  const auto found = table.rows.find(key);
  if (found == table.rows.end() || !found->second.ever_touched) return Existence::kNo;
  const uint64_t oldest_step = step >= staleness ? step - staleness : 0;
  for (const Life& life : found->second.lives) {
    if (life.from <= oldest_step && step < life.until) return Existence::kYes;
  }
  return Existence::kMaybe;
}

}  // namespace frugal_reference
