// A build without Cap'n Proto: nothing can be served or attached to.
#include "process/control.h"

namespace frugal {
namespace {

Status none() {
  return fail(FRUGAL_ERR_UNSUPPORTED,
              "this build has no Cap'n Proto: no trainers as processes; build it with that, or "
              "open without a service");
}

}  // namespace

Status ControlServer::start(const char*, ControlHandler*, std::unique_ptr<ControlServer>* out,
                            const ControlLimits&) {
  out->reset();
  return none();
}
ControlServer::~ControlServer() { (void)impl_; }
void ControlServer::stop() {}
void ControlServer::adopt(int) {}
size_t ControlServer::connections() const { return 0; }

Status ControlClient::connect(const char*, int64_t, std::unique_ptr<ControlClient>* out, uint32_t) {
  out->reset();
  return none();
}
ControlClient::~ControlClient() { (void)impl_; }
void ControlClient::on_end(std::function<void()>) {}
void ControlClient::disconnect() {}
Status ControlClient::ping(int64_t) { return none(); }
Status ControlClient::open(const frugal_config&, int64_t, OpenReply*) { return none(); }
Status ControlClient::create_table(const frugal_table_config&, int64_t, TableReply*) {
  return none();
}
Status ControlClient::find_table(const char*, int64_t, TableReply*) { return none(); }
Status ControlClient::drop_table(uint64_t, int64_t) { return none(); }
Status ControlClient::join(const frugal_trainer_config&, int64_t, JoinReply*) { return none(); }
Status ControlClient::leave(uint32_t, bool, int64_t, uint64_t) { return none(); }
Status ControlClient::stats(int64_t, frugal_stats*) { return none(); }
Status ControlClient::health(int64_t, int32_t*) { return none(); }
Status ControlClient::committed(int64_t, uint64_t*) { return none(); }
pid_t ControlClient::controller_pid() const { return 0; }
int ControlClient::controller_pidfd() const { return -1; }
bool ControlClient::lost() const { return true; }

}  // namespace frugal
