// Trainers on GPUs: joining, polling their device work, failing (docs/cuda.md, "When the host may
// touch what").
#include <algorithm>

#include "base/retry.h"
#include "base/thread.h"
#include "engine/wait.h"

namespace frugal {

Status Engine::join_gpu(const char* device, Trainer& t) {
  std::shared_ptr<device::Runtime> runtime;
  FRUGAL_TRY(device_status(device::open_runtime(device, &runtime), device));
  try {
    FRUGAL_TRY(Gpu::open(runtime, memory_.pinned, &t.gpu));
    pins_.join(t, std::move(runtime));
  } catch (const std::bad_alloc&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "no memory to join on %s: free memory of the machine and call again", device);
  }
  return FRUGAL_OK;
}

bool Engine::pin_one() {
  bool changed;
  const bool worked = pins_.one(&changed);
  if (changed) workers_.progress();
  return worked;
}

// Called before a rank's kernels may read rows.
Status Engine::await_pins(Trainer& t, Deadline deadline) {
  if (pins_.done(t)) return FRUGAL_OK;
  Status s = wait(
      deadline, &t, [&] { return !pins_.waits(t); }, [&] { return pin_one(); });
  if (s == FRUGAL_ERR_STEP_ABORTED) return aborter_.tell(t);
  if (s == FRUGAL_ERR_TIMEOUT)
    return fail(s, "step_begin waited for the tables' memory to be pinned for %s; call again",
                t.gpu->runtime().name());
  return s != FRUGAL_OK || pins_.done(t) ? s : pins_.again(t);
}

Status Engine::set_stream(AnyTrainer& t, void* stream) {
  // This is no call of the step protocol: the next one reports an abort.
  Lock call(t.call_mu);
  FRUGAL_TRY(check());
  if (!t.gpu) return no_streams(t.rank);
  return t.gpu->set_stream(stream);
}

// --- Polling -------------------------------------------------------------------------------------

bool Engine::poll_device_work() {
  if (committer_.stalled()) {
    if (committer_.ready() == FRUGAL_ERR_OUT_OF_MEMORY) throw std::bad_alloc();
    if (!committer_.stalled()) return true;
  }
  if (!in_flight()) return false;
  Vector<DeviceWorkRef> device_work = records_.device_work();
  Vector<std::shared_ptr<KeyDownload>> downloads = declarations_.downloads();
  bool any = false;
  for (const DeviceWorkRef& f : device_work) {
    if (!f->ask()) continue;
    if (f->failed.load())
      device_failed(f->rank, *f->gpu);
    else
      any = true;
  }
  for (const auto& a : downloads) {
    any |= a->ask();
    if (a->failed.load()) device_failed(a->parts.front()->rank, *a->gpu);
  }
  if (!any) return false;
  const uint32_t completed = records_.forget_completed();
  declarations_.downloaded();
  device_work.clear();  // frees their memory, without the lock
  downloads.clear();
  (void)committer_.ready();  // what it cannot commit is stalled
  records_.done(completed);
  workers_.wake();
  workers_.progress();
  return true;
}

Status Engine::await_device_work(Deadline deadline) {
  auto completed = [&] { return !records_.has_device_work() && !committer_.stalled(); };
  if (completed()) return FRUGAL_OK;
  // Writing updates frees memory for a stalled commit.
  Status s = wait(deadline, nullptr, completed, [&] {
    return committer_.stalled() && (workers_.help(true) || flusher_.write(UINT64_MAX));
  });
  if (s == FRUGAL_ERR_TIMEOUT)
    return fail(s, "waited for the device to end steps that ranks have ended; call again");
  return s;
}

// Ends the device work of a step, before the rank's gradients are submitted: it records the events,
// and waits for results that only this call can report. May be repeated.
Status Engine::end_device_work(Trainer& t, DeviceWork::Found* found) {
  DeviceWork* f = t.gpu->current_device_work();
  if (!f) return FRUGAL_OK;
  // The host joins several pushes.
  for (auto& [raw, push] : t.pushes) f->must_complete |= !push.tail.empty();
  FRUGAL_TRY(f->end());
  if (!f->must_complete) return FRUGAL_OK;
  const Deadline until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  FRUGAL_TRY(f->poll([&]() -> Status {
    if (until.passed())
      return fail(FRUGAL_ERR_TIMEOUT,
                  "step_end waited for the device to end the step's work; call again");
    FRUGAL_TRY(check());
    return t.closing.load() ? fail(FRUGAL_ERR_CLOSED, "the trainer is being closed") : FRUGAL_OK;
  }));
  FRUGAL_TRY(t.gpu->sticky() ? begin_call(t) : FRUGAL_OK);
  *found = f->found();
  return FRUGAL_OK;
}

// A rank leaves: waits until each step that it has ended is complete, or undoes it while the rank
// still exists. OUT_OF_MEMORY: the engine is about to be closed, and neither has happened.
Status Engine::end_device_work(Trainer& t) {
  auto next = [&] {
    DeviceWorkRef its;
    ControlLock lock(mu_);
    records_.each_device_work([&](const DeviceWorkRef& f) {
      if (!its && f->gpu == t.gpu && (!f->completed.load() || f->failed.load())) its = f;
    });
    return its;
  };
  while (DeviceWorkRef f = next()) {
    while (!f->ask(1000000)) {
    }
    if (!f->failed.load()) continue;
    t.reaped.store(true);
    const Status s = aborter_.undo_surely(t, Aborter::Why::kFailed);
    if (s != FRUGAL_OK) {
      t.reaped.store(false);  // device_failed, when its failure is found again
      return s;
    }
  }
  return FRUGAL_OK;
}

// A rank's GPU has failed. Its step is undone on all ranks, and the others wait for the rank to be
// closed. A thread of its own undoes, since the caller may be inside a call for which the abort
// waits. Returns at once if the rank has left: its closing has undone the step.
void Engine::device_failed(uint32_t rank, const Gpu& gpu) {
  TrainerRef t;
  try {
    ControlLock lock(mu_);
    if (closed()) return;
    t = ranks_[rank];
    if (!t || t->gpu.get() != &gpu) return;
    if (t->reaped.exchange(true)) return;
    pins_.leave(*t);
    reapers_.reserve(reapers_.size() + 1);
    reapers_.push_back(quiet_thread([this, t] {
      // Retries until the engine is closed. Closing waits for device work in flight, which this
      // abort ends.
      (void)retry_for_memory([&] { return aborter_.undo(*t, Aborter::Why::kFailed); },
                             [this](int) { return closed(); });
    }));
  } catch (...) {
    t->reaped.store(false);  // no memory for a thread: the next poll tries again
  }
}

}  // namespace frugal
