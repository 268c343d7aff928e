// What the command line says.
#ifndef FRUGAL_EXAMPLES_KGE_OPTIONS_H_
#define FRUGAL_EXAMPLES_KGE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "frugal.h"
#include "model.h"

namespace kge {

enum class Loss { kSoftmax, kLogSigmoid, kSelfAdversarial };

struct Options {
  // Data.
  bool debian = true;
  std::string openke;  // a folder; empty: none
  std::string tsv;     // files; empty: none
  std::string tsv_valid;
  std::string tsv_test;
  double held_out = 0.02;  // share of the edges to test with, where the input has no such split

  // Model and training. ParseOptions sets what is left at 0 here by the model and the data.
  Model model = Model::kComplEx;
  Loss loss = Loss::kSoftmax;
  uint32_t dim = 100;  // floats of a row
  bool reciprocal = true;
  float margin = 0;
  float temperature = 1;
  float regularization = 0;
  float init = 0;  // rows begin uniform in +-init
  uint32_t batch = 1024;  // edges of a rank in a step
  uint32_t chunk = 64;    // edges that share negatives
  uint32_t negatives = 256;
  bool batch_negatives = true;
  frugal_optimizer_kind optimizer = FRUGAL_ADAGRAD;
  float lr = 0.1f;
  double epochs = 0;   // 0: no limit
  double seconds = 0;  // of training, about; 0: no limit
  uint64_t seed = 1;

  // Engine.
  uint32_t world = 2;
  uint32_t lookahead = 10;
  uint32_t flush_threads = 1;
  frugal_flush_mode flush = FRUGAL_FLUSH_AUTO;
  uint64_t staleness = 0;
  double cache = 0.1;
  bool reference = false;  // train by the plain loop

  // Checkpoints.
  std::string checkpoint;  // the folder; empty: none
  uint64_t every = 1000;   // steps
  bool resume = false;     // go on from the newest one, if there is one

  // Output.
  int64_t verify = 20;      // steps after which engine and plain loop are compared; 0: never
  double eval_every = 0;    // epochs; 0: at the end only
  uint64_t eval_edges = 0;  // test edges to rank, a random sample; 0: all
  bool baselines = true;
  std::string nearest;      // names, separated by commas
};

// Reads the command line. Returns: false if help was asked for and printed. Throws
// std::runtime_error with a message for the user.
bool ParseOptions(int argc, char** argv, Options* options);

const char* NameOf(Model model);
const char* NameOf(Loss loss);
const char* NameOf(frugal_optimizer_kind kind);
const char* NameOf(frugal_flush_mode mode);

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_OPTIONS_H_
