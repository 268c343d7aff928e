// Trainers join and leave.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/handles.h"
#include "process/client.h"

namespace frugal {

// Long, to keep an order: each guard below takes back what the lines above it have done, until all
// is done.
Status Client::create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) {
  FRUGAL_TRY(controller_.check());
  const RankJoins::Scope one(joins_, config.rank);
  if (!one.alone())
    return fail(FRUGAL_ERR_EXISTS, "another thread of this process is joining as rank %u",
                config.rank);
  auto t = std::allocate_shared<RemoteTrainer>(HeapAllocator<RemoteTrainer>(), controller_);
  t->session = shared_from_this();
  t->rank = config.rank;
  // The device belongs to this process. The controller sees a rank that reads host memory and
  // submits sums, and sends it the refreshes of its caches.
  if (config.device && std::strcmp(config.device, "cpu") != 0)
    FRUGAL_TRY(open_gpu(config, &t->gpu));
  struct Joining {  // runs if it does not join after all
    Pins& pins;
    const Gpu* gpu;
    ~Joining() {
      if (gpu) pins.remove(&gpu->runtime());
    }
  } joining{*pins_, t->gpu.get()};
  JoinReply reply;
  if (Status s = joins_.join(config, &reply, [&] { return forget_lost(); })) {
    joins_.failed(config.rank, s, has_rank(config.rank));
    return s;
  }
  // The rank is this process's now. If anything below fails, the rank is lost: it has not done its
  // part.
  struct Joined {
    RankJoins* joins;
    const uint32_t rank;
    const uint64_t joined;
    ~Joined() {
      if (!joins) return;
      const KeepError why;
      (void)joins->lose(rank, joined);
    }
  } joined{&joins_, config.rank, reply.numbers.empty() ? kAnyJoin : reply.numbers[0]};
  Descriptors d{reply.descriptors};
  auto set_up = [&]() -> Status {
    Lock lock(mu_);
    FRUGAL_TRY(controller_.check());
    FRUGAL_TRY(controller_.connected());
    if (reply.numbers.size() != 2)
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
    t->joined = reply.numbers[0];
    FRUGAL_TRY(controller_.in_arena(reply.numbers[1], &t->notices.home, &t->notices.counted));
    std::unique_ptr<Channel> channel;
    FRUGAL_TRY(d.channel(0, true, &channel));
    t->rpc.open(std::move(channel));
    t->spin_policy.emplace(config_.world_size, &t->channel());
    t->channel().staging_arena(&t->staging);
    t->sums.cut_from(&t->staging);
    if (t->gpu) {
      t->sums.pin_with(pins_->pinner());
      t->gpu->while_waiting([this, trainer = t.get()] {
        trainer->call_mu.assert_held();
        say_here(*trainer);
      });
    }
    t->cpu_ns = process_cpu_ns();
    std::erase_if(trainers_, [](auto& w) { return w.expired(); });
    trainers_.reserve(trainers_.size() + 1);
    t->handle = handle_of<AnyTrainer>(t);
    if (!t->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
    trainers_.push_back(t);
    return FRUGAL_OK;
  };
  FRUGAL_TRY(set_up());
  struct Known {  // removes its handle if its staging memory cannot be published
    RemoteTrainer* t;
    ~Known() {
      if (t) handle_remove(HandleKind::kTrainer, t->handle);
    }
  } known{t.get()};
  {
    Lock call(t->call_mu);
    Exchange e{Call::kMapped, {}, {}};
    FRUGAL_TRY(t->ask(e));
  }
  // Maps regions, its own staging memory among them. A process with too few addresses joins
  // nothing.
  FRUGAL_TRY(controller_.regions().look());
  known.t = nullptr;
  joined.joins = nullptr;
  joining.gpu = nullptr;
  *out = std::move(t);
  return FRUGAL_OK;
}

// Releases what the controller holds for trainers that have lost their ranks; it does so for at
// most kMostReplaced of a process. They read none of it any more. True: it may hold less by now.
bool Client::forget_lost() {
  const KeepError why;
  bool any = false;
  for (size_t i = 0;; ++i) {
    RemoteTrainerRef t;
    {
      Lock lock(mu_);
      if (i >= trainers_.size()) return any;
      t = trainers_[i].lock();
    }
    if (!t || t->closing.load()) continue;
    if (!t->call_mu.try_lock()) continue;
    const UniqueLock call(t->call_mu, std::adopt_lock);
    if (t->forgotten) continue;
    {
      const UniqueLock late(t->late.mu, std::try_to_lock);
      if (!late || t->channel().look() == FRUGAL_OK) continue;
    }
    t->leave_step();
    const Status s = controller_.control().leave(t->rank, true, config_.timeout_ms, t->joined);
    t->forgotten = s == FRUGAL_OK || s == FRUGAL_ERR_NOT_FOUND;
    any |= t->forgotten;
  }
}

bool Client::has_rank(uint32_t rank) {
  Lock lock(mu_);
  return std::any_of(trainers_.begin(), trainers_.end(), [&](auto& weak) {
    const RemoteTrainerRef t = weak.lock();
    return t && t->rank == rank && !t->closing.load() && !t->channel().is_cut();
  });
}

Status Client::close_trainer(const AnyTrainerRef& trainer, bool abandoned) {
  const RemoteTrainerRef t = std::static_pointer_cast<RemoteTrainer>(trainer);
  if (t->closer.exchange(true)) return closes_already();
  struct Closer {  // a close that has failed can be repeated
    RemoteTrainer& t;
    Status s = FRUGAL_ERR_OUT_OF_MEMORY;
    ~Closer() {
      if (s == FRUGAL_OK)
        handle_remove(HandleKind::kTrainer, t.handle);
      else
        t.closer.store(false);
    }
  } closer{*t};
  // A call of the trainer that waits ends. The controller is notified afterwards: it then releases
  // what such a call reads here.
  t->closing.store(true);
  t->channel().cut();
  Lock call(t->call_mu);
  // Before anything can fail: no thread comes here again if the engine is being closed.
  for (auto& [id, batch] : t->batches) handle_remove(HandleKind::kBatch, batch->handle);
  t->batches.clear();
  // Kernels may be writing its staging memory, which may be another trainer's after it has left.
  if (t->gpu) t->gpu->take_device_work();
  Status s = controller_.is_lost() || t->forgotten
                 ? FRUGAL_OK
                 : controller_.control().leave(t->rank, abandoned, config_.timeout_ms, t->joined);
  t->leave_step();
  t->handed.clear();
  t->caches.tables.clear();
  if (t->gpu && !std::exchange(t->device.left, true)) pins_->remove(&t->gpu->runtime());
  // The controller may not know the trainer any more: another process has its rank, or an earlier
  // call has removed it.
  closer.s = s == FRUGAL_ERR_NOT_FOUND || s == FRUGAL_ERR_PEER_LOST || s == FRUGAL_ERR_CLOSED
                 ? FRUGAL_OK
                 : s;
  return closer.s;
}

Status Client::set_stream(AnyTrainer& t, void* stream) {
  // No call of the step protocol: the next one reports an abort.
  Lock call(t.call_mu);
  FRUGAL_TRY(controller_.check());
  if (!t.gpu) return no_streams(t.rank);
  return t.gpu->set_stream(stream);
}

}  // namespace frugal
