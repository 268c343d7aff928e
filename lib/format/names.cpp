#include "format/names.h"

#include <cstring>
#include <string_view>

#include "base/status.h"

namespace frugal {
namespace {

constexpr std::string_view kRowsEnd = ".rows", kBlobEnd = ".blob", kManifestEnd = ".checkpoint";
constexpr std::string_view kNewEnd = ".new", kDeletedEnd = ".deleted";

String numbered(uint64_t number, std::string_view end) {
  return text("%llu%s", static_cast<unsigned long long>(number), end.data());
}

}  // namespace

String rows_name(uint64_t number) { return numbered(number, kRowsEnd); }
String blob_name(uint64_t sequence) { return numbered(sequence, kBlobEnd); }
String manifest_name(uint64_t sequence) { return numbered(sequence, kManifestEnd); }
String deleted_name(uint64_t sequence) { return numbered(sequence, kDeletedEnd); }
String new_name(const String& name) { return name + kNewEnd.data(); }

FileKind parse_name(const char* name, uint64_t* number) {
  uint64_t parsed = 0;
  const char* at = name;
  for (; *at >= '0' && *at <= '9'; ++at) {
    const auto digit = static_cast<uint64_t>(*at - '0');
    if (parsed > (UINT64_MAX - digit) / 10) return FileKind::kForeign;
    parsed = parsed * 10 + digit;
  }
  if (at == name || (*name == '0' && at != name + 1) || parsed >= kNamesEnd)
    return FileKind::kForeign;
  std::string_view end(at);
  const bool is_new = end.ends_with(kNewEnd);
  if (is_new) end.remove_suffix(kNewEnd.size());
  FileKind kind;
  if (end == kRowsEnd)
    kind = FileKind::kRows;
  else if (end == kBlobEnd)
    kind = FileKind::kBlob;
  else if (end == kManifestEnd)
    kind = FileKind::kManifest;
  else if (end == kDeletedEnd && !is_new)
    kind = FileKind::kDeleted;
  else
    return FileKind::kForeign;
  *number = parsed;
  return is_new ? FileKind::kNew : kind;
}

}  // namespace frugal
