// A build without Cap'n Proto: no manifest can be read or written.
#include "format/manifest.h"

namespace frugal {
namespace {

Status no_manifests() {
  return fail(FRUGAL_ERR_UNSUPPORTED,
              "this build has no Cap'n Proto: no checkpoints; build it with that");
}

}  // namespace

Status write_manifest(Folder&, const Manifest&) { return no_manifests(); }
Status read_manifest(const Folder&, uint64_t, Manifest*, File*) { return no_manifests(); }
Status list_manifests(const Folder&, Vector<uint64_t>*) { return no_manifests(); }
Status delete_manifest(Folder&, uint64_t, bool*, bool) { return no_manifests(); }
Status read_deleted(const Folder&, uint64_t, Manifest*) { return no_manifests(); }
Status encode_manifest(const Manifest&, Vector<uint64_t>*) { return no_manifests(); }
Status decode_manifest(const char*, uint64_t, const uint64_t*, size_t, Manifest*) {
  return no_manifests();
}

}  // namespace frugal
