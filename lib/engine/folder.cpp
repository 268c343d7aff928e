// The folder of checkpoints that an engine writes, and what ranks add to a checkpoint.
#include "engine/wait.h"

namespace frugal {

Status Engine::open_folder(const char* path, const frugal_folder_config& config) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  return checkpoints_.open(path, config);
}

Status Engine::close_folder() {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  return checkpoints_.close();
}

Status Engine::checkpoint(const frugal_checkpoint_config& config, uint64_t* number) {
  FRUGAL_TRY(check());
  return checkpoints_.request(config, number);
}

Status Engine::await_checkpoint(uint64_t number, Deadline deadline, frugal_checkpoint_info* info) {
  FRUGAL_TRY(check());
  return checkpoints_.wait(number, deadline.at, info);
}

Status Engine::cancel_checkpoint(uint64_t number) {
  FRUGAL_TRY(check());
  return checkpoints_.cancel(number);
}

Status Engine::delete_checkpoint(uint64_t number) {
  FRUGAL_TRY(check());
  return checkpoints_.remove(number);
}

Status Engine::checkpoint_due(AnyTrainer& any, bool* due) {
  Trainer& t = own(any);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(ranks_.check_inside(t));
  *due = checkpoints_.due(t.step);
  return FRUGAL_OK;
}

Status Engine::give_blob(AnyTrainer& any, const void* bytes, size_t size) {
  Trainer& t = own(any);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(ranks_.check_inside(t));
  if (!checkpoints_.opened()) return FRUGAL_OK;
  auto blob = std::make_unique<Blob>();
  FRUGAL_TRY(blob->set(t.rank, bytes, size, memory_.unread()));
  t.blob = std::move(blob);
  return FRUGAL_OK;
}

}  // namespace frugal
