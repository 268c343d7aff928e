// Biased matrix factorization: rating = mean + user bias + item bias + user row . item row.
//   movielens [FILE]    lines of FILE: user TAB item TAB rating TAB anything, as in u.data
// Without a file it makes ratings from planted rows and noise, so that the best possible error is
// known. README.md says exactly what is computed; the other languages print the same numbers.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <frugal.hpp>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t kDim = 4, kBatch = 256, kEpochs = 10, kAhead = 4;
constexpr size_t kUsers = 400, kItems = 300, kRatings = 50000;  // of the planted set

struct Rating {
  uint64_t user = 0, item = 0;
  float value = 0;
  double noise = 0;  // planted: what no model can know
};

// --- Data ---

class Random {
 public:
  explicit Random(uint64_t state) : state_(state) {}
  uint64_t Next() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Nearly normal, with mean 0 and deviation 1: exact, so that every language has the same bits.
  double Normal() {
    double sum = 0;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(Next() >> 40) / 16777216;
    return sum - 6;
  }
  std::vector<double> Normals(size_t count, double deviation) {
    std::vector<double> result(count);
    for (double& x : result) x = deviation * Normal();
    return result;
  }

 private:
  uint64_t state_;
};

std::vector<Rating> Plant() {
  Random random(1);
  const std::vector<double> user_bias = random.Normals(kUsers, 0.4);
  const std::vector<double> item_bias = random.Normals(kItems, 0.4);
  const std::vector<double> users = random.Normals(kUsers * kDim, 0.6);
  const std::vector<double> items = random.Normals(kItems * kDim, 0.6);
  std::vector<Rating> ratings(kRatings);
  for (Rating& r : ratings) {
    r.user = random.Next() % kUsers;
    r.item = random.Next() % kItems;
    r.noise = 0.3 * random.Normal();
    double value = 3.5 + user_bias[r.user] + item_bias[r.item];
    for (size_t c = 0; c < kDim; ++c) value += users[r.user * kDim + c] * items[r.item * kDim + c];
    r.value = static_cast<float>(value + r.noise);
  }
  return ratings;
}

// Reads a text that ends with a zero. Each call returns whether it found what it skips or reads.
struct Reader {
  const char* at;

  bool Skip(const char* set) {
    const size_t count = std::strspn(at, set);
    at += count;
    return count > 0;
  }
  bool Blanks() { return Skip(" \t\r"); }
  bool Digits() { return Skip("0123456789"); }
  bool SignAndDigits() {
    if (*at == '+' || *at == '-') ++at;
    return Digits();
  }
  bool Take(char c) {
    if (*at != c) return false;
    ++at;
    return true;
  }

  bool Key(uint64_t* key) {
    const char* begin = at;
    if (!Digits()) return false;
    errno = 0;
    *key = std::strtoull(begin, nullptr, 10);
    return errno == 0;
  }
  bool Value(float* value) {
    const char* begin = at;
    if (!SignAndDigits() || (Take('.') && !Digits())) return false;
    if (Take('e') && !SignAndDigits()) return false;
    *value = static_cast<float>(std::strtod(begin, nullptr));
    return std::isfinite(*value);
  }
};

std::vector<Rating> Load(const std::string& path) {
  std::vector<Rating> ratings;
  std::ifstream file(path, std::ios::binary);
  std::string line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    Reader reader{line.c_str()};
    const char* end = reader.at + line.size();
    reader.Blanks();
    if (reader.at == end) continue;
    Rating r;
    if (!reader.Key(&r.user) || !reader.Blanks() || !reader.Key(&r.item) || !reader.Blanks() ||
        !reader.Value(&r.value) || !(reader.at == end || reader.Blanks())) {
      throw std::runtime_error(path + ": line " + std::to_string(number) +
                               " is not of the form user, item, rating");
    }
    ratings.push_back(r);
  }
  if (!file.eof()) throw std::runtime_error(path + ": cannot be read");
  if (ratings.size() < 10) {
    throw std::runtime_error(path + ": " + std::to_string(ratings.size()) +
                             " ratings, at least 10 are needed");
  }
  return ratings;
}

// --- Model: a batch of ratings, its four ops and their buffers ---

struct Model {
  std::vector<frugal::Table> tables;  // users, items, user biases, item biases
  float mean = 0;
  std::vector<uint64_t> users, items;
  std::vector<float> rows[4], grads[4], errors;

  // By their keys, or by a declared batch of just these ratings.
  std::vector<frugal_op> Ops(frugal::Span<const Rating> ratings, const frugal::Batch* batch) {
    users.clear();
    items.clear();
    for (const Rating& r : ratings) {
      users.push_back(r.user);
      items.push_back(r.item);
    }
    std::vector<frugal_op> ops;
    for (uint32_t t = 0; t < 4; ++t) {
      ops.push_back(batch ? frugal::Op(tables[t], *batch, t)
                          : frugal::Op(tables[t], t % 2 ? items : users));
      rows[t].resize(ratings.size() * tables[t].dim());
      grads[t].resize(rows[t].size());
      ops[t].rows_out = rows[t].data();
      ops[t].grads = grads[t].data();
    }
    return ops;
  }

  // Sets `errors` from `rows`, and adds their squares to a sum.
  void Compare(frugal::Span<const Rating> ratings, double* squares) {
    errors.resize(ratings.size());
    for (size_t k = 0; k < ratings.size(); ++k) {
      float guess = mean + rows[2][k] + rows[3][k];
      for (size_t c = 0; c < kDim; ++c) guess += rows[0][k * kDim + c] * rows[1][k * kDim + c];
      errors[k] = ratings[k].value - guess;
      *squares += static_cast<double>(errors[k]) * errors[k];
    }
  }

  void Differentiate() {  // half the squared error
    for (size_t k = 0; k < errors.size(); ++k) {
      for (size_t c = 0; c < kDim; ++c) {
        grads[0][k * kDim + c] = -errors[k] * rows[1][k * kDim + c];
        grads[1][k * kDim + c] = -errors[k] * rows[0][k * kDim + c];
      }
      grads[2][k] = grads[3][k] = -errors[k];
    }
  }
};

std::vector<frugal::Span<const Rating>> Batches(const std::vector<Rating>& ratings) {
  std::vector<frugal::Span<const Rating>> batches;
  for (size_t from = 0; from < ratings.size(); from += kBatch) {
    batches.emplace_back(&ratings[from], std::min(kBatch, ratings.size() - from));
  }
  return batches;
}

void Run(const std::vector<Rating>& ratings, bool planted) {
  std::vector<Rating> train, test;
  Model model;
  double sum = 0, noise = 0;
  for (size_t n = 0; n < ratings.size(); ++n) {  // every tenth rating is for the test
    (n % 10 == 9 ? test : train).push_back(ratings[n]);
    if (n % 10 == 9) {
      noise += ratings[n].noise * ratings[n].noise;
    } else {
      sum += ratings[n].value;
    }
  }
  model.mean = static_cast<float>(sum / static_cast<double>(train.size()));
  std::printf("%zu ratings to train, %zu to test, mean %.4f\n", train.size(), test.size(),
              model.mean);

  frugal::Engine engine;
  for (const char* name : {"users", "items", "user biases", "item biases"}) {
    const bool bias = model.tables.size() >= 2;
    auto config = frugal::TableConfig(name, train.size(), bias ? 1 : kDim);
    config.key_space = FRUGAL_HASHED;  // any id will do; rows come with their first use
    config.init = bias ? FRUGAL_INIT_CONSTANT : FRUGAL_INIT_NORMAL;
    config.init_b = bias ? 0.0f : 0.1f;
    config.optimizer = frugal::Optimizer(FRUGAL_ADAGRAD);
    config.optimizer.lr = 0.1f;
    config.optimizer.weight_decay_l2 = 0.02f;
    model.tables.push_back(engine.CreateTable(config));
  }
  frugal::Trainer trainer = engine.CreateTrainer();

  Random random(2);
  uint64_t step = 0;
  for (size_t epoch = 1; epoch <= kEpochs; ++epoch) {
    for (size_t n = train.size(); n > 1; --n) {  // Fisher and Yates
      std::swap(train[n - 1], train[random.Next() % n]);
    }
    double train_squares = 0, test_squares = 0;
    const auto batches = Batches(train);
    std::deque<frugal::Batch> declared;  // of batch b and those after it
    for (size_t b = 0; b < batches.size(); ++b, ++step) {
      for (size_t next = b + declared.size(); next < batches.size() && next <= b + kAhead; ++next) {
        declared.push_back(trainer.Prefetch(step + (next - b), model.Ops(batches[next], nullptr)));
      }
      const std::vector<frugal_op> ops = model.Ops(batches[b], &declared.front());
      trainer.StepBegin(step);
      trainer.Lookup(ops);
      model.Compare(batches[b], &train_squares);
      model.Differentiate();
      trainer.PushGrad(ops);
      trainer.StepEnd(step);
      declared.pop_front();
    }
    for (const auto& some : Batches(test)) {  // rows that are missing read as zeros
      engine.Read(nullptr, model.Ops(some, nullptr));
      model.Compare(some, &test_squares);
    }
    std::printf("epoch %2zu: train RMSE %.4f, test RMSE %.4f\n", epoch,
                std::sqrt(train_squares / static_cast<double>(train.size())),
                std::sqrt(test_squares / static_cast<double>(test.size())));
  }
  if (planted) {
    std::printf("known optimum: test RMSE %.4f\n",
                std::sqrt(noise / static_cast<double>(test.size())));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Run(argc > 1 ? Load(argv[1]) : Plant(), argc == 1);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
