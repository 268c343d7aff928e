// The graph of a Debian machine's package lists. Nodes of packages and virtual packages have the
// package's name. Names of other nodes have a prefix: `source:`, `section:`, `tag:`, `maintainer:`.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <stdexcept>
#include <tuple>

#include "graph.h"

namespace kge {
namespace {

using Fields = std::map<std::string, std::string, std::less<>>;

std::string_view Trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// Calls `visit(part, index)` for each trimmed, non-empty part of a separated list.
template <typename Visit>
void Split(std::string_view text, char separator, Visit visit) {
  for (size_t index = 0;; ++index) {
    const size_t end = text.find(separator);
    const std::string_view part = Trim(text.substr(0, end));
    if (!part.empty()) visit(part, index);
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

class Builder {
 public:
  explicit Builder(Graph* graph) : graph_(graph) {}

  // Priority is left out on purpose: nearly every package is "optional", which says nothing.
  void Paragraph(const Fields& fields) {
    const std::string_view package = Get(fields, "Package");
    if (package.empty()) return;
    const uint32_t head = graph_->entity_names.Id(package);
    Packages(fields, "Depends", "depends", head);
    Packages(fields, "Pre-Depends", "pre-depends", head);
    Packages(fields, "Recommends", "recommends", head);
    Packages(fields, "Suggests", "suggests", head);
    Packages(fields, "Enhances", "enhances", head);
    Packages(fields, "Provides", "provides", head);
    Packages(fields, "Breaks", "breaks", head);
    Packages(fields, "Conflicts", "conflicts", head);
    Packages(fields, "Replaces", "replaces", head);
    Packages(fields, "Built-Using", "built-using", head);

    std::string_view source = Get(fields, "Source");
    source = Trim(source.substr(0, source.find('(')));
    Add(head, "source", "source:", source.empty() ? package : source);
    Add(head, "section", "section:", Get(fields, "Section"));
    // The address names a team more reliably than the name before it.
    const std::string_view maintainer = Get(fields, "Maintainer");
    const size_t address = maintainer.find('<');
    Add(head, "maintainer", "maintainer:",
        address == std::string_view::npos
            ? maintainer
            : maintainer.substr(address + 1, maintainer.find('>') - address - 1));
    Split(Get(fields, "Tag"), ',', [&](std::string_view tag, size_t) {
      // One relation for each facet, as in `role::program`.
      Add(head, "tag-" + std::string(tag.substr(0, tag.find("::"))), "tag:", tag);
    });
  }

  void Finish() {
    // Several versions of a package can be listed; equal edges count once.
    auto key = [](const Edge& e) { return std::tie(e.head, e.relation, e.tail); };
    std::vector<Edge>& edges = graph_->train;
    std::sort(edges.begin(), edges.end(),
              [&](const Edge& a, const Edge& b) { return key(a) < key(b); });
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    graph_->entities = graph_->entity_names.size();
    graph_->relations = graph_->relation_names.size();
  }

 private:
  static std::string_view Get(const Fields& fields, std::string_view name) {
    const auto field = fields.find(name);
    return field == fields.end() ? std::string_view() : std::string_view(field->second);
  }

  void Add(uint32_t head, std::string_view relation, std::string_view prefix,
           std::string_view tail) {
    if (tail.empty()) return;
    graph_->train.push_back({head, graph_->entity_names.Id(std::string(prefix).append(tail)),
                             graph_->relation_names.Id(relation)});
  }

  // `a (>= 1), b | c:any`: versions and architectures are dropped, alternatives after the first
  // have a relation of their own.
  void Packages(const Fields& fields, std::string_view field, const std::string& relation,
                uint32_t head) {
    Split(Get(fields, field), ',', [&](std::string_view group, size_t) {
      Split(group, '|', [&](std::string_view item, size_t index) {
        Add(head, index == 0 ? relation : relation + "-alternative", "",
            item.substr(0, item.find_first_of(" \t(:[<")));
      });
    });
  }

  Graph* graph_;
};

// Parses paragraphs of `Field: value` lines. A line that begins with a space continues the field.
class Parser {
 public:
  explicit Parser(Builder* builder) : builder_(builder) {}

  void Line(std::string_view line) {
    if (Trim(line).empty()) return Flush();
    if (line[0] == ' ' || line[0] == '\t') {
      if (value_ != nullptr) value_->append(line);
      return;
    }
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) return;
    value_ = &fields_[std::string(line.substr(0, colon))];
    *value_ = Trim(line.substr(colon + 1));
  }

  void Flush() {
    if (!fields_.empty()) builder_->Paragraph(fields_);
    fields_.clear();
    value_ = nullptr;
  }

 private:
  Builder* builder_;
  Fields fields_;
  std::string* value_ = nullptr;
};

}  // namespace

Graph ReadDebian() {
  Graph graph;
  graph.title = "the Debian package lists of this machine (apt-cache dumpavail)";
  Builder builder(&graph);
  Parser parser(&builder);
  if (FILE* pipe = popen("apt-cache dumpavail 2>/dev/null", "r")) {
    char* line = nullptr;
    size_t capacity = 0;
    ssize_t length;
    while ((length = getline(&line, &capacity, pipe)) >= 0) {
      parser.Line(std::string_view(line, static_cast<size_t>(length)));
    }
    free(line);
    pclose(pipe);
  }
  parser.Flush();
  if (graph.train.empty()) {
    graph.title = "the installed Debian packages (/var/lib/dpkg/status)";
    std::ifstream status("/var/lib/dpkg/status");
    for (std::string line; std::getline(status, line);) parser.Line(line);
    parser.Flush();
  }
  if (graph.train.empty()) {
    throw std::runtime_error(
        "no package lists: apt-cache dumpavail is empty and /var/lib/dpkg/status cannot be read; "
        "try --openke or --tsv");
  }
  builder.Finish();
  return graph;
}

}  // namespace kge
