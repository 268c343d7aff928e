#include "options.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace kge {
namespace {

const std::map<std::string, Model> kModels = {{"transe_l1", Model::kTransEL1},
                                              {"transe_l2", Model::kTransEL2},
                                              {"distmult", Model::kDistMult},
                                              {"complex", Model::kComplEx},
                                              {"simple", Model::kSimplE}};
const std::map<std::string, Loss> kLosses = {{"softmax", Loss::kSoftmax},
                                             {"logsigmoid", Loss::kLogSigmoid},
                                             {"self_adversarial", Loss::kSelfAdversarial}};
const std::map<std::string, frugal_optimizer_kind> kOptimizers = {
    {"adagrad", FRUGAL_ADAGRAD},
    {"rowwise_adagrad", FRUGAL_ROWWISE_ADAGRAD},
    {"adam", FRUGAL_ADAM},
    {"sgd", FRUGAL_SGD}};
const std::map<std::string, frugal_flush_mode> kFlushModes = {
    {"auto", FRUGAL_FLUSH_AUTO},
    {"at_once", FRUGAL_FLUSH_AT_ONCE},
    {"deferred", FRUGAL_FLUSH_DEFERRED},
    {"write_through", FRUGAL_FLUSH_WRITE_THROUGH},
    {"tree_heap", FRUGAL_FLUSH_TREE_HEAP}};
const std::map<std::string, bool> kSwitch = {{"on", true}, {"off", false}};

struct Entry {
  std::string name;
  std::string argument;  // empty: takes none
  std::string help;
  std::function<void(const std::string&)> set;
};

template <typename T>
Entry Choice(const std::string& name, const std::string& help, const std::map<std::string, T>& all,
             T* out) {
  std::string words, shown;
  for (const auto& [word, value] : all) {
    words += (words.empty() ? "" : "|") + word;
    if (value == *out) shown = word;
  }
  return {name, words, help + " (" + shown + ")", [=, &all](const std::string& text) {
            const auto found = all.find(text);
            if (found == all.end()) {
              throw std::runtime_error(name + " takes one of " + words + ", not " + text);
            }
            *out = found->second;
          }};
}

template <typename T>
Entry Number(const std::string& name, const std::string& help, double least, double most, T* out) {
  std::ostringstream shown;
  if (*out != T{}) shown << " (" << *out << ")";
  return {name, "N", help + shown.str(), [=](const std::string& text) {
            std::istringstream in(text);
            T value;
            // An unsigned number would take "-1" for a huge one.
            if (!(in >> value) || !in.eof() || text[0] == '-' ||
                static_cast<double>(value) < least || static_cast<double>(value) > most) {
              std::ostringstream range;
              range << name << " takes a number from " << least << " to " << most << ", not "
                    << text;
              throw std::runtime_error(range.str());
            }
            *out = value;
          }};
}

Entry Text(const std::string& name, const std::string& argument, const std::string& help,
           std::string* out) {
  return {name, argument, help, [=](const std::string& text) { *out = text; }};
}

template <typename T>
const char* Find(const std::map<std::string, T>& all, T value) {
  for (const auto& [word, candidate] : all) {
    if (candidate == value) return word.c_str();
  }
  return "?";
}

void PrintHelp(const std::vector<Entry>& entries) {
  std::printf("Trains knowledge-graph embeddings with Frugal.\n\nusage: kge [option ...]\n\n");
  for (const Entry& entry : entries) {
    const std::string left = entry.name + (entry.argument.empty() ? "" : " " + entry.argument);
    if (entry.name.empty()) {
      std::printf("\n%s\n", entry.help.c_str());
    } else if (left.size() <= 22) {
      std::printf("  %-22s %s\n", left.c_str(), entry.help.c_str());
    } else {
      std::printf("  %s\n  %22s %s\n", left.c_str(), "", entry.help.c_str());
    }
  }
}

}  // namespace

const char* NameOf(Model model) { return Find(kModels, model); }
const char* NameOf(Loss loss) { return Find(kLosses, loss); }
const char* NameOf(frugal_optimizer_kind kind) { return Find(kOptimizers, kind); }
const char* NameOf(frugal_flush_mode mode) { return Find(kFlushModes, mode); }

bool ParseOptions(int argc, char** argv, Options* o) {
  bool help = false;
  constexpr double kMany = 1e18;
  const std::vector<Entry> entries = {
      {"", "", "Data:", {}},
      {"--debian", "", "the package lists of this machine (the default)",
       [=](const std::string&) { o->openke.clear(), o->tsv.clear(); }},
      Text("--openke", "DIR", "a folder with train2id.txt, valid2id.txt and test2id.txt",
           &o->openke),
      Text("--tsv", "FILE", "lines of head, relation and tail, separated by tabs", &o->tsv),
      Text("--tsv-valid", "FILE", "the same, to validate with", &o->tsv_valid),
      Text("--tsv-test", "FILE", "the same, to test with", &o->tsv_test),
      Number("--held-out", "share of the edges to test with if there are none", 0, 0.9,
             &o->held_out),
      {"", "", "Model:", {}},
      Choice("--model", "the model", kModels, &o->model),
      Number("--dim", "floats of a row; half as many complex numbers", 1, 65536, &o->dim),
      Choice("--reciprocal", "a row of its own for each reversed relation; TransE: off", kSwitch,
             &o->reciprocal),
      Choice("--loss", "the loss; TransE: self_adversarial", kLosses, &o->loss),
      Number("--margin", "gamma of the logistic losses; TransE: 9", 0, 1e6, &o->margin),
      Number("--temperature", "alpha of the self-adversarial loss", 0, 1e6, &o->temperature),
      Number("--regularization", "N3 coefficient; 0.05, TransE: 0", 0, 1e6, &o->regularization),
      Number("--init", "rows begin uniform in +-N; 0.1, TransE: (margin + 2) / dim", 0, 1e6,
             &o->init),
      {"", "", "Training:", {}},
      Number("--batch", "edges of a trainer in a step", 1, 1e7, &o->batch),
      Number("--chunk", "edges that share negatives", 1, 1e6, &o->chunk),
      Number("--negatives", "uniform negatives of a chunk", 0, 1e6, &o->negatives),
      Choice("--batch-negatives", "also the other edges' ends in the chunk", kSwitch,
             &o->batch_negatives),
      Choice("--optimizer", "the optimizer", kOptimizers, &o->optimizer),
      Number("--lr", "learning rate", 0, 1e6, &o->lr),
      Number("--epochs", "end after so many, 0 for no limit; 30, --debian: 0", 0, 1e9,
             &o->epochs),
      Number("--seconds", "end after so much training, 0 for no limit; --debian: 60", 0, 1e9,
             &o->seconds),
      Number("--seed", "of batches, negatives and initial rows", 0, kMany, &o->seed),
      {"", "", "Engine:", {}},
      Number("--world", "trainers, each a thread", 1, 256, &o->world),
      Number("--lookahead", "steps declared ahead", 0, FRUGAL_MAX_LOOKAHEAD, &o->lookahead),
      Number("--cache", "share of the rows that each trainer caches", 0, 1, &o->cache),
      Choice("--flush", "how updates reach the rows", kFlushModes, &o->flush),
      Number("--flush-threads", "background threads", 0, 256, &o->flush_threads),
      {"--staleness", "N", "steps that a row may lag, or `async`; 0 is exact (0)",
       [=](const std::string& text) {
         if (text == "async") {
           o->staleness = FRUGAL_STALENESS_ASYNC;
         } else {
           Number("--staleness", "", 0, kMany, &o->staleness).set(text);
         }
       }},
      {"--reference", "", "train with plain arrays and a loop instead of the engine",
       [=](const std::string&) { o->reference = true; }},
      {"", "", "Checkpoints:", {}},
      Text("--checkpoint", "DIR", "write checkpoints to this folder while training goes on",
           &o->checkpoint),
      Number("--every", "steps from one to the next", 1, kMany, &o->every),
      {"--resume", "", "go on from the newest checkpoint of the folder, if it has one",
       [=](const std::string&) { o->resume = true; }},
      {"", "", "Output:", {}},
      {"--verify", "N", "compare with a plain loop after N steps; `all` at the end, 0 never (20)",
       [=](const std::string& text) {
         if (text == "all") {
           o->verify = -1;
         } else {
           Number("--verify", "", 0, 1e15, &o->verify).set(text);
         }
       }},
      Number("--eval-every", "epochs between evaluations; 0 for one at the end", 0, 1e9,
             &o->eval_every),
      Number("--eval-edges", "test edges to rank, 0 for all; --debian: 2000", 0, kMany,
             &o->eval_edges),
      Choice("--baselines", "rank by chance and by popularity too", kSwitch, &o->baselines),
      Text("--nearest", "A,B,...", "print the nearest neighbours of these entities", &o->nearest),
      {"--help", "", "print this", [&](const std::string&) { help = true; }},
  };

  std::vector<std::string> given;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    std::string value;
    const size_t equals = name.find('=');
    const bool joined = equals != std::string::npos;
    if (joined) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& candidate) {
      return !candidate.name.empty() && candidate.name == name;
    });
    if (entry == entries.end()) {
      throw std::runtime_error("unknown option " + name + "; --help lists them");
    }
    if (entry->argument.empty()) {
      if (joined) throw std::runtime_error(name + " takes no value");
    } else if (!joined) {
      if (++i == argc) throw std::runtime_error(name + " takes a value: " + entry->argument);
      value = argv[i];
    }
    entry->set(value);
    given.push_back(name);
  }
  if (help) {
    PrintHelp(entries);
    return false;
  }

  auto was_given = [&](const char* name) {
    return std::find(given.begin(), given.end(), name) != given.end();
  };
  o->debian = o->openke.empty() && o->tsv.empty();
  if (o->debian) {
    if (!was_given("--epochs") && !was_given("--seconds")) o->seconds = 60;
    if (!was_given("--eval-edges")) o->eval_edges = 2000;
    if (!was_given("--nearest")) {
      o->nearest = "gcc,python3-numpy,nginx,vim,postgresql-15,firefox-esr";
    }
  } else if (!was_given("--epochs") && !was_given("--seconds")) {
    o->epochs = 30;
  }
  // The translation models have other habits (Sun et al. 2019).
  const bool translation = o->model == Model::kTransEL1 || o->model == Model::kTransEL2;
  if (translation && !was_given("--loss")) o->loss = Loss::kSelfAdversarial;
  if (translation && !was_given("--margin")) o->margin = 9;
  if (translation && !was_given("--reciprocal")) o->reciprocal = false;
  if (!translation && !was_given("--regularization")) o->regularization = 0.05f;
  if (o->init == 0) o->init = translation ? (o->margin + 2) / static_cast<float>(o->dim) : 0.1f;
  if (o->checkpoint.empty() && (o->resume || was_given("--every"))) {
    throw std::runtime_error("--every and --resume need --checkpoint");
  }
  if (!o->checkpoint.empty() && o->reference) {
    throw std::runtime_error("--reference has no checkpoints: leave --checkpoint out");
  }
  if (o->epochs == 0 && o->seconds == 0) {
    throw std::runtime_error("one of --epochs and --seconds must set an end");
  }
  if ((o->model == Model::kComplEx || o->model == Model::kSimplE) && o->dim % 2 != 0) {
    throw std::runtime_error("--dim must be even for this model");
  }
  if (o->negatives == 0 && !o->batch_negatives) {
    throw std::runtime_error("there must be negatives: --negatives or --batch-negatives");
  }
  return true;
}

}  // namespace kge
