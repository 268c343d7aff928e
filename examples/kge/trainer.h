// The training loop: every rank's steps through a back end, with the progress line.
#ifndef FRUGAL_EXAMPLES_KGE_TRAINER_H_
#define FRUGAL_EXAMPLES_KGE_TRAINER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "backend.h"
#include "options.h"
#include "sampler.h"
#include "worker.h"

namespace kge {

class Trainer {
 public:
  // The arguments must outlive the trainer.
  Trainer(const Sampler& sampler, const Options& options, Backend* backend, bool quiet);

  // Trains up to, and without, `last_step`; less if the whole training takes more than `seconds`
  // (0: no limit). All ranks stop after the same step. `expected_steps` is what the progress bar
  // takes for the whole. Rethrows what a rank threw.
  void Run(uint64_t last_step, double seconds, uint64_t expected_steps);

  uint64_t steps() const { return next_step_; }
  uint64_t edges() const { return edges_; }
  double seconds() const { return seconds_; }
  // Of the edges since the last call, the mean over edges and both directions.
  double TakeLoss();
  // "12.3 % hits", or "-" without a cache or an engine.
  std::string CacheText();
  // The share of the trainers' time that passed in waiting at the gate.
  std::string StallText();

 private:
  struct Rank {
    Rank(const Options& options, size_t window) : worker(options), ring(window) {}
    Worker worker;
    std::vector<Batch> ring;  // the batches of this step and of those declared, by step modulo
    uint64_t declared = 0;    // steps below are declared
    uint64_t edges = 0;       // that it has trained
    std::vector<float> entities;
    std::vector<float> relations;
  };

  // Whether `step` is to be made; ranks ask before each step.
  bool Admit(uint64_t step);
  void Step(uint32_t rank, uint64_t step);
  void Loop(uint32_t first_rank, uint32_t last_rank);
  void Line(double elapsed, double seconds, uint64_t expected_steps, bool last);

  const Sampler& sampler_;
  const Options& options_;
  Backend* backend_;
  bool quiet_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t next_step_ = 0;
  double seconds_ = 0;
  std::atomic<uint64_t> edges_{0};

  std::mutex mutex_;  // of all below
  std::condition_variable done_;
  uint64_t stop_ = 0;      // the first step that is not made
  uint64_t admitted_ = 0;  // steps below have been begun by some rank
  uint32_t running_ = 0;
  std::exception_ptr error_;
  double loss_ = 0;
  uint64_t loss_edges_ = 0;

  double last_loss_ = 0;
  double last_line_ = 0;
  double rate_time_ = 0;
  uint64_t rate_edges_ = 0;
  double rate_ = 0;
};

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_TRAINER_H_
