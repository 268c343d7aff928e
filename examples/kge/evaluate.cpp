#include "evaluate.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "kernels.h"
#include "random.h"

namespace kge {
namespace {

constexpr size_t kQuestions = 64;  // of a block
constexpr size_t kEntities = 1024;
constexpr float kLeftOut = -1e30f;

uint64_t Place(Side side, uint32_t relation, uint32_t known) {
  return (uint64_t{relation} << 33) | (uint64_t{known} << 1) | (side == Side::kHead ? 1 : 0);
}

class ByModel : public Ranking {
 public:
  ByModel(const Graph& graph, const Options& options, const float* entities,
          const float* relations)
      : graph_(graph),
        options_(options),
        entities_(entities),
        relations_(relations),
        scorer_(options.model, options.dim) {}

  void Start(const Question* questions, size_t count, float* answers_out) override {
    const size_t dim = options_.dim;
    queries_.resize(count * dim);
    answers_.resize(count * dim);
    count_ = count;
    for (size_t i = 0; i < count; ++i) {
      const Question& question = questions[i];
      const bool reversed = question.side == Side::kHead && options_.reciprocal;
      const size_t relation = question.relation + (reversed ? graph_.relations : 0);
      MakeQueries(options_.model, reversed ? Side::kTail : question.side, 1, dim,
                  entities_ + question.known * dim, relations_ + relation * dim,
                  queries_.data() + i * dim);
      std::copy_n(entities_ + question.answer * dim, dim, answers_.data() + i * dim);
    }
    // The diagonal of a small matrix: the same operations as for the candidates, the same bits.
    scores_.resize(count * Padded(count));
    Scores(answers_.data(), count, scores_.data());
    for (size_t i = 0; i < count; ++i) answers_out[i] = scores_[i * Padded(count) + i];
  }

  void Scores(uint32_t first, size_t entities, float* scores) override {
    Scores(entities_ + first * size_t{options_.dim}, entities, scores);
  }

 private:
  void Scores(const float* rows, size_t count, float* scores) {
    scorer_.Scores(count, rows, count_, queries_.data(), scores);
  }

  const Graph& graph_;
  const Options& options_;
  const float* entities_;
  const float* relations_;
  Scorer scorer_;
  size_t count_ = 0;
  std::vector<float> queries_;
  std::vector<float> answers_;
  std::vector<float> scores_;
};

// Entities and their numbers of edges, by (side, relation), sorted by entity.
using Counts = std::unordered_map<uint64_t, std::vector<std::pair<uint32_t, float>>>;

class ByPopularity : public Ranking {
 public:
  explicit ByPopularity(const Counts& counts) : counts_(counts) {}

  void Start(const Question* questions, size_t count, float* answers_out) override {
    lists_.clear();
    for (size_t i = 0; i < count; ++i) {
      const auto list = counts_.find(Place(questions[i].side, questions[i].relation, 0));
      lists_.push_back(list == counts_.end() ? nullptr : &list->second);
      answers_out[i] = 0;
      Visit(i, questions[i].answer, 1, [&](uint32_t, float score) { answers_out[i] = score; });
    }
  }

  void Scores(uint32_t first, size_t entities, float* scores) override {
    const size_t step = Padded(lists_.size());
    std::fill_n(scores, entities * step, 0.0f);
    for (size_t i = 0; i < lists_.size(); ++i) {
      Visit(i, first, entities,
            [&](uint32_t entity, float score) { scores[(entity - first) * step + i] = score; });
    }
  }

 private:
  template <typename Use>
  void Visit(size_t i, uint32_t first, size_t entities, Use use) const {
    if (lists_[i] == nullptr) return;
    auto entry = std::lower_bound(lists_[i]->begin(), lists_[i]->end(), std::pair(first, 0.0f));
    for (; entry != lists_[i]->end() && entry->first < first + entities; ++entry) {
      use(entry->first, entry->second);
    }
  }

  const Counts& counts_;
  std::vector<const std::vector<std::pair<uint32_t, float>>*> lists_;
};

class ByChance : public Ranking {
 public:
  explicit ByChance(uint64_t seed) : seed_(seed) {}

  void Start(const Question* questions, size_t count, float* answers_out) override {
    streams_.clear();
    for (size_t i = 0; i < count; ++i) {
      streams_.push_back(Stream(seed_, 'c', questions[i].number));
      answers_out[i] = Score(i, questions[i].answer);
    }
  }

  void Scores(uint32_t first, size_t entities, float* scores) override {
    const size_t step = Padded(streams_.size());
    for (size_t j = 0; j < entities; ++j) {
      for (size_t i = 0; i < streams_.size(); ++i) {
        scores[j * step + i] = Score(i, static_cast<uint32_t>(first + j));
      }
    }
  }

 private:
  float Score(size_t i, uint32_t entity) const {
    return static_cast<float>(Draw(streams_[i], entity) >> 40);
  }

  uint64_t seed_;
  std::vector<uint64_t> streams_;
};

}  // namespace

Evaluator::Evaluator(const Graph& graph) : graph_(graph) {
  for (const auto* edges : {&graph.train, &graph.valid, &graph.test}) {
    for (const Edge& edge : *edges) {
      known_[Place(Side::kTail, edge.relation, edge.head)].push_back(edge.tail);
      known_[Place(Side::kHead, edge.relation, edge.tail)].push_back(edge.head);
    }
  }
  for (auto& [place, answers] : known_) {
    std::sort(answers.begin(), answers.end());
    answers.erase(std::unique(answers.begin(), answers.end()), answers.end());
  }
}

const std::vector<uint32_t>& Evaluator::Known(const Question& question) const {
  return known_.at(Place(question.side, question.relation, question.known));
}

Metrics Evaluator::Run(const std::vector<Edge>& edges, uint64_t most, uint64_t seed,
                       size_t threads, const MakeRanking& make) const {
  std::vector<Question> questions;
  const size_t count = most == 0 ? edges.size() : std::min<size_t>(most, edges.size());
  const Permutation order(edges.size(), Stream(seed, 'q', 0));
  for (size_t i = 0; i < count; ++i) {
    const Edge& edge = edges[order(i)];
    questions.push_back({Side::kTail, edge.head, edge.relation, edge.tail, 2 * i});
    questions.push_back({Side::kHead, edge.tail, edge.relation, edge.head, 2 * i + 1});
  }

  std::vector<double> ranks(questions.size());
  std::atomic<size_t> next{0};
  auto work = [&] {
    const std::unique_ptr<Ranking> ranking = make();
    std::vector<float> scores(kEntities * kQuestions);
    std::vector<size_t> cursors(kQuestions);
    for (;;) {
      const size_t begin = next.fetch_add(kQuestions);
      if (begin >= questions.size()) return;
      const size_t block = std::min(kQuestions, questions.size() - begin);
      const Question* asked = questions.data() + begin;
      float answers[kQuestions] = {};
      int32_t below[kQuestions] = {}, equal[kQuestions] = {};
      ranking->Start(asked, block, answers);
      std::fill(cursors.begin(), cursors.end(), 0);
      for (size_t first = 0; first < graph_.entities; first += kEntities) {
        const size_t entities = std::min(kEntities, graph_.entities - first);
        ranking->Scores(static_cast<uint32_t>(first), entities, scores.data());
        for (size_t i = 0; i < block; ++i) {
          const std::vector<uint32_t>& known = Known(asked[i]);
          for (; cursors[i] < known.size() && known[cursors[i]] < first + entities; ++cursors[i]) {
            scores[(known[cursors[i]] - first) * Padded(block) + i] = kLeftOut;
          }
        }
        Best().count(entities, Padded(block), scores.data(), answers, below, equal);
      }
      for (size_t i = 0; i < block; ++i) {
        // Entities that are left out, and the true one, count as below, unless its score is NaN.
        const double above = static_cast<double>(graph_.entities) - below[i] - equal[i];
        ranks[begin + i] = 1 + above + 0.5 * equal[i];
      }
    }
  };
  std::vector<std::thread> pool;
  for (size_t t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();

  Metrics metrics;
  metrics.questions = questions.size();
  for (const double rank : ranks) {
    metrics.mrr += 1 / rank;
    metrics.hits1 += rank <= 1;
    metrics.hits3 += rank <= 3;
    metrics.hits10 += rank <= 10;
  }
  const double share = ranks.empty() ? 0 : 1.0 / static_cast<double>(ranks.size());
  metrics.mrr *= share;
  metrics.hits1 *= share;
  metrics.hits3 *= share;
  metrics.hits10 *= share;
  return metrics;
}

MakeRanking ModelRanking(const Graph& graph, const Options& options, const float* entities,
                         const float* relations) {
  return [=, &graph, &options] {
    return std::make_unique<ByModel>(graph, options, entities, relations);
  };
}

MakeRanking PopularityRanking(const Graph& graph) {
  auto counts = std::make_shared<Counts>();
  for (const Edge& edge : graph.train) {
    (*counts)[Place(Side::kTail, edge.relation, 0)].push_back({edge.tail, 1.0f});
    (*counts)[Place(Side::kHead, edge.relation, 0)].push_back({edge.head, 1.0f});
  }
  for (auto& [place, list] : *counts) {
    std::sort(list.begin(), list.end());
    size_t kept = 0;
    for (size_t i = 1; i < list.size(); ++i) {
      if (list[i].first == list[kept].first) {
        list[kept].second += 1;
      } else {
        list[++kept] = list[i];
      }
    }
    list.resize(kept + 1);
  }
  return [counts] { return std::make_unique<ByPopularity>(*counts); };
}

MakeRanking RandomRanking(uint64_t seed) {
  return [seed] { return std::make_unique<ByChance>(seed); };
}

}  // namespace kge
