#include "trainer.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

namespace kge {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Trainer::Trainer(const Sampler& sampler, const Options& options, Backend* backend, bool quiet)
    : sampler_(sampler), options_(options), backend_(backend), quiet_(quiet) {
  for (uint32_t rank = 0; rank < options.world; ++rank) {
    ranks_.push_back(std::make_unique<Rank>(options, options.lookahead + 1));
    ranks_.back()->declared = backend->FirstStep();
  }
  next_step_ = backend->FirstStep();
  rate_edges_ = edges_ = ranks_[0]->edges = backend->FirstEdges();
}

bool Trainer::Admit(uint64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step >= stop_) return false;
  admitted_ = std::max(admitted_, step + 1);
  return true;
}

void Trainer::Step(uint32_t index, uint64_t step) {
  Rank& rank = *ranks_[index];
  const size_t window = rank.ring.size();
  for (; rank.declared < step + window; ++rank.declared) {
    Batch& later = rank.ring[rank.declared % window];
    sampler_.Fill(index, rank.declared, &later);
    backend_->Declare(index, later);
  }
  const Batch& batch = rank.ring[step % window];
  const size_t entity_floats = batch.entities.size() * options_.dim;
  const size_t relation_floats = batch.relations.size() * options_.dim;
  rank.entities.resize(std::max(rank.entities.size(), entity_floats));
  rank.relations.resize(std::max(rank.relations.size(), relation_floats));

  backend_->Begin(index, batch);
  backend_->Lookup(index, batch, rank.entities.data(), rank.relations.data());
  float* entity_grads = backend_->GradientMemory(index, entity_floats + relation_floats);
  float* relation_grads = entity_grads + entity_floats;
  const double loss = rank.worker.Compute(batch, rank.entities.data(), rank.relations.data(),
                                          entity_grads, relation_grads);
  backend_->Push(index, batch, entity_grads, relation_grads);
  rank.edges += batch.edges;
  backend_->Keep(index, rank.edges);
  backend_->End(index, batch);

  edges_ += batch.edges;
  const std::lock_guard<std::mutex> lock(mutex_);
  loss_ += loss;
  loss_edges_ += batch.edges;
}

void Trainer::Loop(uint32_t first_rank, uint32_t last_rank) {
  try {
    for (uint64_t step = next_step_; Admit(step); ++step) {
      for (uint32_t rank = first_rank; rank < last_rank; ++rank) Step(rank, step);
    }
  } catch (...) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = 0;
    }
    for (uint32_t rank = first_rank; rank < last_rank; ++rank) backend_->Leave(rank);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_;
  done_.notify_all();
}

void Trainer::Run(uint64_t last_step, double seconds, uint64_t expected_steps) {
  if (last_step <= next_step_) return;
  const Clock::time_point start = Clock::now();
  const double before = seconds_;
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = last_step;
    admitted_ = next_step_;
    running_ = backend_->threaded() ? options_.world : 1;
  }
  if (backend_->threaded()) {
    for (uint32_t rank = 0; rank < options_.world; ++rank) {
      threads.emplace_back([this, rank] { Loop(rank, rank + 1); });
    }
  } else {
    threads.emplace_back([this] { Loop(0, options_.world); });
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (running_ > 0) {
      done_.wait_for(lock, std::chrono::milliseconds(100));
      seconds_ = before + Since(start);
      // Every rank continues to the last step that any rank has begun.
      if (seconds > 0 && seconds_ >= seconds) stop_ = std::min(stop_, admitted_);
      lock.unlock();
      if (!quiet_) Line(seconds_, seconds, expected_steps, false);
      lock.lock();
    }
  }
  for (std::thread& thread : threads) thread.join();
  seconds_ = before + Since(start);
  if (error_) std::rethrow_exception(error_);
  next_step_ = stop_;
  if (!quiet_) Line(seconds_, seconds, expected_steps, true);
}

double Trainer::TakeLoss() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (loss_edges_ > 0) last_loss_ = loss_ / (2.0 * static_cast<double>(loss_edges_));
  loss_ = 0;
  loss_edges_ = 0;
  return last_loss_;
}

std::string Trainer::CacheText() {
  frugal_stats stats{};
  if (!backend_->Stats(&stats)) return "-";
  const double keys = static_cast<double>(stats.cache_hits + stats.cache_misses);
  if (keys == 0) return "-";
  char text[64];
  const double share = static_cast<double>(stats.cache_hits) / keys;
  std::snprintf(text, sizeof text, "%.1f %% hits", 100 * share);
  return text;
}

std::string Trainer::StallText() {
  frugal_stats stats{};
  if (!backend_->Stats(&stats) || seconds_ == 0) return "-";
  char text[64];
  std::snprintf(text, sizeof text, "%.1f %%",
                1e-7 * static_cast<double>(stats.gate_wait_ns) / (seconds_ * options_.world));
  return text;
}

void Trainer::Line(double elapsed, double seconds, uint64_t expected_steps, bool last) {
  static const bool terminal = isatty(STDOUT_FILENO) == 1;
  // A file gets a line now and then, a screen one that changes.
  const double pause = terminal ? 0.25 : 10;
  if (!last && elapsed - last_line_ < pause) return;
  last_line_ = elapsed;
  const uint64_t edges = edges_;
  if (elapsed - rate_time_ > 0.5 || rate_ == 0) {
    rate_ = static_cast<double>(edges - rate_edges_) / std::max(1e-9, elapsed - rate_time_);
    rate_time_ = elapsed;
    rate_edges_ = edges;
  }
  const double epoch =
      static_cast<double>(edges) / static_cast<double>(sampler_.edges_per_epoch());
  double share = 0;
  if (expected_steps != UINT64_MAX) {
    share = epoch * static_cast<double>(sampler_.steps_per_epoch()) /
            static_cast<double>(expected_steps);
  }
  if (seconds > 0) share = std::max(share, elapsed / seconds);
  constexpr int kWidth = 20;
  const int full = static_cast<int>(std::min(1.0, share) * kWidth);
  std::printf("%s[%s%s] %5.1f s  epoch %.2f  %.0f edges/s  loss %.4f  cache %s  stall %s%s",
              terminal ? "\r\033[K" : "", std::string(full, '=').c_str(),
              std::string(kWidth - full, ' ').c_str(), elapsed, epoch, rate_, TakeLoss(),
              CacheText().c_str(), StallText().c_str(), terminal && !last ? "" : "\n");
  std::fflush(stdout);
}

}  // namespace kge
