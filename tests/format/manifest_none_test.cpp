// A build without Cap'n Proto has no manifests, and says so.
#include <gtest/gtest.h>

#include "format/manifest.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace frugal::manifest_none_test {

TEST(NoManifests, EachCallSaysSo) {
  TemporaryFolder place;
  std::shared_ptr<Folder> folder;
  ASSERT_OK(Folder::open(place.path().c_str(), Folder::Use::kWrite, &folder));
  Manifest manifest;
  File keep;
  Vector<uint64_t> words;
  bool in_use = false;
  const Status all[] = {
      write_manifest(*folder, manifest), read_manifest(*folder, 1, &manifest, &keep),
      list_manifests(*folder, &words),   delete_manifest(*folder, 1, &in_use),
      encode_manifest(manifest, &words), decode_manifest("here", 1, words.data(), 0, &manifest)};
  for (const Status s : all) EXPECT_EQ(s, FRUGAL_ERR_UNSUPPORTED);
  EXPECT_NE(LastMessage().find("Cap'n Proto"), std::string::npos) << LastMessage();
  EXPECT_EQ(place.Files(), std::set<std::string>{"lock"});
}

}  // namespace frugal::manifest_none_test
