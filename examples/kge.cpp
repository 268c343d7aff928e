// Knowledge-graph embeddings with Frugal, through include/frugal.h alone.
//
//   kge                        the graph of this machine's Debian packages, about a minute
//   kge --openke DIR           FB15k-237, WN18 and other folders in OpenKE's format
//   kge --tsv FILE             tab-separated triples
//   kge --help                 everything else
//
// The parts, each in its file of the folder kge: graph and debian read data, sampler says which
// edges and negatives a step has, model and kernels compute scores and gradients, worker does the
// forward and backward pass of a step, backend keeps the tables (the engine, or a plain loop that
// must give the same bits), trainer runs the steps, evaluate ranks. docs/kge.md has the settings
// and results for known data sets.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kge/backend.h"
#include "kge/evaluate.h"
#include "kge/graph.h"
#include "kge/options.h"
#include "kge/sampler.h"
#include "kge/trainer.h"

namespace {

using namespace kge;  // NOLINT: this file is the whole of the program's own scope.

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Graph ReadGraph(const Options& options) {
  Graph graph = !options.openke.empty() ? ReadOpenKe(options.openke)
                : !options.tsv.empty()
                    ? ReadTsv(options.tsv, options.tsv_valid, options.tsv_test)
                    : ReadDebian();
  if (graph.train.empty()) throw std::runtime_error(graph.title + " has no edges");
  if (graph.test.empty() && options.held_out > 0) {
    HoldOut(options.held_out, options.seed, &graph);
  }
  return graph;
}

void Describe(const Graph& graph, const Options& options) {
  std::printf("graph      %s\n", graph.title.c_str());
  std::printf("           %zu nodes, %zu relations, %zu edges to train, %zu to validate, %zu to "
              "test\n",
              graph.entities, graph.relations, graph.train.size(), graph.valid.size(),
              graph.test.size());
  std::printf("model      %s, %u floats a row, %s loss, %s relations, N3 %g\n",
              NameOf(options.model), options.dim, NameOf(options.loss),
              options.reciprocal ? "reciprocal" : "plain", options.regularization);
  std::printf("training   %s, lr %g, batches of %u edges in chunks of %u with %u uniform "
              "negatives%s\n",
              NameOf(options.optimizer), options.lr, options.batch, options.chunk,
              options.negatives, options.batch_negatives ? " and those of the chunk" : "");
  if (options.reference) {
    std::printf("tables     plain arrays and a loop, %u trainers in turn", options.world);
  } else {
    std::printf("tables     frugal %s, %u trainers, lookahead %u, cache %g %%, flush %s",
                frugal_version(), options.world, options.lookahead, 100 * options.cache,
                NameOf(options.flush));
  }
  std::printf("; %s\n", Best().name);
}

// The same steps by plain arrays and a loop, and the comparison of every bit of both tables, the
// optimizer's state included. Returns: whether they are equal.
bool Verify(const Graph& graph, const Options& options, const Sampler& sampler, uint64_t steps,
            Backend* engine) {
  const double start = Now();
  const std::unique_ptr<Backend> plain = MakePlainBackend(graph, options);
  Trainer loop(sampler, options, plain.get(), /*quiet=*/true);
  loop.Run(steps, 0, steps);
  size_t different = 0;
  for (const Table table : {Table::kEntity, Table::kRelation}) {
    const std::vector<float> ours = engine->Rows(table, true);
    const std::vector<float> theirs = plain->Rows(table, true);
    if (ours.size() != theirs.size()) return false;
    for (size_t i = 0; i < ours.size(); ++i) {
      different += std::memcmp(&ours[i], &theirs[i], sizeof(float)) != 0;
    }
  }
  std::printf("same bits as a plain loop: %s", different == 0 ? "yes" : "NO");
  if (different > 0) std::printf(", %zu floats differ", different);
  std::printf(" (both tables with optimizer state after %llu steps; the loop took %.1f s)\n",
              static_cast<unsigned long long>(steps), Now() - start);
  std::fflush(stdout);
  return different == 0;
}

void PrintMetrics(const char* name, const Metrics& m) {
  std::printf("%-12s MRR %.4f  Hits@1 %.4f  Hits@3 %.4f  Hits@10 %.4f\n", name, m.mrr, m.hits1,
              m.hits3, m.hits10);
  std::fflush(stdout);
}

Metrics Evaluate(const Graph& graph, const Options& options, const Evaluator& evaluator,
                 const std::vector<Edge>& edges, Backend* backend) {
  const std::vector<float> entities = backend->Rows(Table::kEntity, false);
  const std::vector<float> relations = backend->Rows(Table::kRelation, false);
  return evaluator.Run(edges, options.eval_edges, options.seed, options.world,
                       ModelRanking(graph, options, entities.data(), relations.data()));
}

// The entities with the largest cosine, among those that are the head of an edge: in the Debian
// graph, the packages.
void PrintNearest(const Graph& graph, const Options& options, Backend* backend) {
  const size_t dim = options.dim;
  std::vector<float> rows = backend->Rows(Table::kEntity, false);
  std::vector<bool> is_head(graph.entities);
  for (const Edge& edge : graph.train) is_head[edge.head] = true;
  for (size_t e = 0; e < graph.entities; ++e) {
    double square = 0;
    for (size_t k = 0; k < dim; ++k) square += double{rows[e * dim + k]} * rows[e * dim + k];
    const float scale = square > 0 ? static_cast<float>(1 / std::sqrt(square)) : 0;
    for (size_t k = 0; k < dim; ++k) rows[e * dim + k] *= scale;
  }
  for (size_t begin = 0; begin < options.nearest.size();) {
    const size_t end = std::min(options.nearest.find(',', begin), options.nearest.size());
    const std::string name = options.nearest.substr(begin, end - begin);
    begin = end + 1;
    const int64_t id = graph.entity_names.Find(name);
    if (id < 0) continue;
    std::vector<std::pair<float, size_t>> scored;
    for (size_t e = 0; e < graph.entities; ++e) {
      if (e == static_cast<size_t>(id) || !is_head[e]) continue;
      float cosine = 0;
      for (size_t k = 0; k < dim; ++k) cosine += rows[id * dim + k] * rows[e * dim + k];
      scored.push_back({-cosine, e});
    }
    const size_t count = std::min<size_t>(6, scored.size());
    std::partial_sort(scored.begin(), scored.begin() + count, scored.end());
    std::printf("%-14s ~", name.c_str());
    for (size_t i = 0; i < count; ++i) {
      std::printf(" %s %.2f%s", graph.entity_names[scored[i].second].c_str(), -scored[i].first,
                  i + 1 < count ? "," : "\n");
    }
  }
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, &options)) return 0;
  const Graph graph = ReadGraph(options);
  const Sampler sampler(graph, options);
  Describe(graph, options);
  std::unique_ptr<Backend> backend = options.reference ? MakePlainBackend(graph, options)
                                                       : MakeFrugalBackend(graph, options);
  Trainer trainer(sampler, options, backend.get(), /*quiet=*/false);
  const Evaluator evaluator(graph);

  if (trainer.steps() > 0) {
    std::printf("resumed    after %llu steps\n", static_cast<unsigned long long>(trainer.steps()));
  }

  const double per_epoch = static_cast<double>(sampler.steps_per_epoch());
  const uint64_t total = options.epochs > 0
                             ? static_cast<uint64_t>(std::ceil(options.epochs * per_epoch))
                             : UINT64_MAX;
  const bool verify = options.verify != 0 && !options.reference && options.staleness == 0;
  bool same = true;
  if (options.verify != 0 && options.staleness > 0) {
    std::printf("not compared with a plain loop: with staleness the timing decides\n");
  }
  if (verify && options.verify > 0 && trainer.steps() == 0) {
    trainer.Run(std::min<uint64_t>(options.verify, total), 0, total);
    same = Verify(graph, options, sampler, trainer.steps(), backend.get());
  }
  for (uint64_t evaluations = 1;; ++evaluations) {
    uint64_t last = total;
    if (options.eval_every > 0) {
      const double steps = options.eval_every * per_epoch * static_cast<double>(evaluations);
      last = std::min(total, static_cast<uint64_t>(std::ceil(steps)));
      if (last < total && last <= trainer.steps()) continue;  // before what was resumed from
    }
    trainer.Run(std::max(last, trainer.steps()), options.seconds, total);
    if (trainer.steps() >= total || trainer.steps() < last) break;
    const bool has_valid = !graph.valid.empty();
    const Metrics m = Evaluate(graph, options, evaluator, has_valid ? graph.valid : graph.test,
                               backend.get());
    PrintMetrics(has_valid ? "validation" : "test", m);
  }
  std::printf("trained    %llu steps, %.2f epochs, %.1f s, %.0f edges/s, cache %s, stall %s\n",
              static_cast<unsigned long long>(trainer.steps()),
              static_cast<double>(trainer.steps()) / per_epoch, trainer.seconds(),
              static_cast<double>(trainer.edges() - backend->FirstEdges()) /
                  std::max(trainer.seconds(), 1e-9),
              trainer.CacheText().c_str(), trainer.StallText().c_str());
  backend->Save();
  if (verify && options.verify < 0) {
    same = Verify(graph, options, sampler, trainer.steps(), backend.get());
  }

  if (!graph.test.empty()) {
    const double start = Now();
    const Metrics model = Evaluate(graph, options, evaluator, graph.test, backend.get());
    std::printf("filtered ranks of %llu of %zu test edges among %zu nodes, both directions, %.1f "
                "s:\n",
                static_cast<unsigned long long>(model.questions / 2), graph.test.size(),
                graph.entities, Now() - start);
    PrintMetrics(NameOf(options.model), model);
    if (options.baselines) {
      auto rank_by = [&](const MakeRanking& make) {
        return evaluator.Run(graph.test, options.eval_edges, options.seed, options.world, make);
      };
      const Metrics popularity = rank_by(PopularityRanking(graph));
      PrintMetrics("popularity", popularity);
      PrintMetrics("random", rank_by(RandomRanking(options.seed)));
      std::printf("MRR is %.1f times that of popularity\n", model.mrr / popularity.mrr);
    }
  }
  if (!options.nearest.empty()) PrintNearest(graph, options, backend.get());
  return same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Main(argc, argv);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "kge: %s\n", error.what());
    return 2;
  }
}
