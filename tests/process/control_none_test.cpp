// Without Cap'n Proto, serving and attaching return FRUGAL_ERR_UNSUPPORTED, with a message that
// names Cap'n Proto.
#include <gtest/gtest.h>

#include <cstring>

#include "process/control.h"

TEST(ControlNone, SaysWhatIsMissing) {
  std::unique_ptr<frugal::ControlServer> server;
  std::unique_ptr<frugal::ControlClient> client;
  const auto missing = [](frugal::Status s) {
    frugal_error e;
    frugal::end_call(s);
    frugal::last_error(&e);
    return s == FRUGAL_ERR_UNSUPPORTED && std::strstr(e.message, "Cap'n Proto") != nullptr;
  };
  frugal::begin_call();
  EXPECT_TRUE(missing(frugal::ControlServer::start("/tmp/none", nullptr, &server)));
  frugal::begin_call();
  EXPECT_TRUE(missing(frugal::ControlClient::connect("/tmp/none", 0, &client)));
  EXPECT_FALSE(server);
  EXPECT_FALSE(client);
}
