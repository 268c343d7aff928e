// A finding of a check, in a line.
#include <cinttypes>

#include "format/folder_check.h"

namespace frugal {

String quoted(const String& name) {
  String line = "\"";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') line += '\\';
    if (byte < 0x20 || byte == 0x7f)
      line += text("\\x%02x", byte);
    else
      line += c;
  }
  return line + "\"";
}

String FolderFinding::line() const {
  String line = kind == Kind::kFault ? "fault" : kind == Kind::kUnread ? "unread" : "note";
  line += " file=";
  line += quoted(file).substr(1, quoted(file).size() - 2);
  if (offset) line += text(" offset=%" PRIu64, *offset);
  if (table) line += text(" table=%" PRIu64, *table) + " name=" + quoted(table_name);
  if (key) line += text(" key=%" PRIu64, *key);
  return line + ": " + quoted(what).substr(1, quoted(what).size() - 2);
}

}  // namespace frugal
