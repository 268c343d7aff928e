// Training with plain arrays and a loop: the steps of docs/arithmetic.md in their plainest form,
// one thread, nothing ahead of time. The engine must give the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "backend.h"
#include "random.h"

namespace kge {
namespace {

// A NaN is stored as one bit pattern.
float Stored(float x) {
  if (x == x) return x;
  const uint32_t bits = 0x7fc00000;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// sum16 of "Shapes of sums" in docs/arithmetic.md.
float Sum16(const std::vector<float>& x) {
  float lanes[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lanes[i % 16] += x[i];
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Of "From the gradient to the update": t = step + 1, in double, by squaring from the low bit.
double Power(double x, uint64_t t) {
  double r = 1;
  for (; t != 0; t >>= 1, x *= x) {
    if (t & 1) r *= x;
  }
  return r;
}

class PlainTable {
 public:
  PlainTable(const TableShape& shape, const Options& options)
      : dim_(options.dim),
        optimizer_(OptimizerOf(options)),
        values_(shape.rows * dim_),
        state_floats_(StateFloats(options)),
        state_(shape.rows * state_floats_, 0.0f) {
    // The uniform values of "Initial values".
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : std::string_view(shape.name)) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
    const uint64_t table = Mix(options.seed + hash);
    const double a = -shape.init, b = shape.init;
    for (uint64_t key = 0; key < shape.rows; ++key) {
      const uint64_t row = Mix(table ^ Mix(key + kGolden));
      for (uint64_t column = 0; column < dim_; ++column) {
        const uint64_t bits = Mix(row + (column + 1) * kGolden);
        const double u = static_cast<double>(bits >> 11) * 0x1p-53;
        values_[key * dim_ + column] = static_cast<float>(a + (b - a) * u);
      }
    }
  }

  const float* Row(uint64_t key) const { return values_.data() + key * dim_; }

  // One step: keys and gradient rows of each rank, in the order of their positions.
  void Apply(uint64_t step, const std::vector<std::vector<uint64_t>>& keys,
             const std::vector<std::vector<float>>& grads) {
    struct Occurrence {
      uint64_t key;
      uint32_t rank;
      uint32_t position;
      auto operator<=>(const Occurrence&) const = default;
    };
    std::vector<Occurrence> all;
    for (uint32_t rank = 0; rank < keys.size(); ++rank) {
      for (uint32_t i = 0; i < keys[rank].size(); ++i) all.push_back({keys[rank][i], rank, i});
    }
    std::sort(all.begin(), all.end());

    std::vector<float> gradient(dim_);
    std::vector<const float*> terms;
    for (size_t i = 0; i < all.size();) {
      const uint64_t key = all[i].key;
      bool first_rank = true;
      while (i < all.size() && all[i].key == key) {
        const uint32_t rank = all[i].rank;
        terms.clear();
        for (; i < all.size() && all[i].key == key && all[i].rank == rank; ++i) {
          terms.push_back(grads[rank].data() + all[i].position * dim_);
        }
        const float* sum = Fold(terms);
        for (size_t k = 0; k < dim_; ++k) {
          gradient[k] = first_rank ? sum[k] : gradient[k] + sum[k];
        }
        first_rank = false;
      }
      Update(step, key, gradient);
    }
  }

  std::vector<float> Rows(bool with_state) const {
    if (!with_state) return values_;
    std::vector<float> rows;
    for (size_t row = 0; row * dim_ < values_.size(); ++row) {
      rows.insert(rows.end(), values_.begin() + row * dim_, values_.begin() + (row + 1) * dim_);
      rows.insert(rows.end(), state_.begin() + row * state_floats_,
                  state_.begin() + (row + 1) * state_floats_);
    }
    return rows;
  }

 private:
  // fold32: runs of 32 are summed serially, then neighbours pairwise until one sum is left.
  const float* Fold(const std::vector<const float*>& terms) {
    size_t runs = (terms.size() + 31) / 32;
    runs_.resize(std::max(runs_.size(), runs * dim_));
    for (size_t run = 0; run < runs; ++run) {
      float* sum = runs_.data() + run * dim_;
      const size_t end = std::min(terms.size(), (run + 1) * 32);
      std::copy_n(terms[run * 32], dim_, sum);
      for (size_t i = run * 32 + 1; i < end; ++i) {
        for (size_t k = 0; k < dim_; ++k) sum[k] += terms[i][k];
      }
    }
    for (; runs > 1; runs = (runs + 1) / 2) {
      for (size_t run = 0; run < runs; run += 2) {
        float* to = runs_.data() + run / 2 * dim_;
        const float* left = runs_.data() + run * dim_;
        if (run + 1 == runs) {
          std::copy_n(left, dim_, to);
        } else {
          for (size_t k = 0; k < dim_; ++k) to[k] = left[k] + left[dim_ + k];
        }
      }
    }
    return runs_.data();
  }

  // "From the gradient to the update". The demo uses none of the options before and after the
  // optimizer.
  void Update(uint64_t step, uint64_t key, const std::vector<float>& g) {
    float* w = values_.data() + key * dim_;
    float* state = state_.data() + key * state_floats_;
    const float lr = optimizer_.lr;
    const float eps = optimizer_.eps;
    switch (optimizer_.kind) {
      case FRUGAL_SGD:
        for (size_t k = 0; k < dim_; ++k) w[k] = Stored(w[k] - lr * g[k]);
        break;
      case FRUGAL_ADAGRAD:
        for (size_t k = 0; k < dim_; ++k) {
          state[k] = Stored(state[k] + g[k] * g[k]);
          w[k] = Stored(w[k] - (lr * g[k]) / (std::sqrt(state[k]) + eps));
        }
        break;
      case FRUGAL_ROWWISE_ADAGRAD: {
        squares_.resize(dim_);
        for (size_t k = 0; k < dim_; ++k) squares_[k] = g[k] * g[k];
        state[0] = Stored(state[0] + Sum16(squares_) / static_cast<float>(dim_));
        const float q = lr / (std::sqrt(state[0]) + eps);
        for (size_t k = 0; k < dim_; ++k) w[k] = Stored(w[k] - q * g[k]);
        break;
      }
      case FRUGAL_ADAM: {
        const float b1 = optimizer_.beta1, b2 = optimizer_.beta2;
        const float c1 = 1.0f - b1, c2 = 1.0f - b2;
        const double root = std::sqrt(1 - Power(b2, step + 1));
        const float alpha =
            static_cast<float>((static_cast<double>(lr) * root) / (1 - Power(b1, step + 1)));
        float* m = state;
        float* v = state + dim_;
        for (size_t k = 0; k < dim_; ++k) {
          m[k] = Stored(b1 * m[k] + c1 * g[k]);
          v[k] = Stored(b2 * v[k] + (c2 * g[k]) * g[k]);
          w[k] = Stored(w[k] - (alpha * m[k]) / (std::sqrt(v[k]) + eps));
        }
        break;
      }
    }
  }

  size_t dim_;
  frugal_optimizer optimizer_;
  std::vector<float> values_;
  size_t state_floats_;
  std::vector<float> state_;
  std::vector<float> runs_;
  std::vector<float> squares_;
};

class PlainBackend : public Backend {
 public:
  PlainBackend(const Graph& graph, const Options& options)
      : options_(options), memory_(options.world) {
    for (const Table table : {Table::kEntity, Table::kRelation}) {
      tables_.emplace_back(ShapeOf(table, graph, options), options);
      keys_.emplace_back(options.world);
      grads_.emplace_back(options.world);
    }
  }

  bool threaded() const override { return false; }
  void Declare(uint32_t, const Batch&) override {}
  void Begin(uint32_t, const Batch&) override {}
  void Leave(uint32_t) override {}
  bool Stats(frugal_stats*) override { return false; }

  void Lookup(uint32_t, const Batch& batch, float* entities, float* relations) override {
    const size_t dim = options_.dim;
    for (size_t i = 0; i < batch.entities.size(); ++i) {
      std::copy_n(tables_[0].Row(batch.entities[i]), dim, entities + i * dim);
    }
    for (size_t i = 0; i < batch.relations.size(); ++i) {
      std::copy_n(tables_[1].Row(batch.relations[i]), dim, relations + i * dim);
    }
  }

  float* GradientMemory(uint32_t rank, size_t floats) override {
    memory_[rank].resize(std::max(memory_[rank].size(), floats));
    return memory_[rank].data();
  }

  void Push(uint32_t rank, const Batch& batch, const float* entity_grads,
            const float* relation_grads) override {
    const size_t dim = options_.dim;
    keys_[0][rank] = batch.entities;
    keys_[1][rank] = batch.relations;
    grads_[0][rank].assign(entity_grads, entity_grads + batch.entities.size() * dim);
    grads_[1][rank].assign(relation_grads, relation_grads + batch.relations.size() * dim);
  }

  void Keep(uint32_t, uint64_t) override {}

  void End(uint32_t rank, const Batch& batch) override {
    if (rank + 1 < options_.world) return;
    for (size_t t = 0; t < tables_.size(); ++t) tables_[t].Apply(batch.step, keys_[t], grads_[t]);
  }

  std::vector<float> Rows(Table table, bool with_state) override {
    return tables_[static_cast<int>(table)].Rows(with_state);
  }

 private:
  const Options& options_;
  std::vector<PlainTable> tables_;
  std::vector<std::vector<std::vector<uint64_t>>> keys_;  // by table and rank
  std::vector<std::vector<std::vector<float>>> grads_;    // likewise
  std::vector<std::vector<float>> memory_;                // by rank
};

}  // namespace

std::unique_ptr<Backend> MakePlainBackend(const Graph& graph, const Options& options) {
  return std::make_unique<PlainBackend>(graph, options);
}

}  // namespace kge
