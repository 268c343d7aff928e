#include "graph.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "random.h"

namespace kge {
namespace {

std::ifstream Open(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return file;
}

// The names of `entity2id.txt` are optional: everything but their print works without them.
void ReadNames(const std::string& path, Names* names) {
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line)) return;
  while (std::getline(file, line)) {
    const size_t cut = line.find_last_of("\t ");
    if (cut == std::string::npos) continue;
    // A file that is not in order of ids cannot be used: numbers are printed instead of names.
    if (names->Id(line.substr(0, cut)) != std::stoull(line.substr(cut + 1))) {
      *names = Names();
      return;
    }
  }
}

std::vector<Edge> ReadNumbers(const std::string& path, Graph* graph) {
  std::ifstream file = Open(path);
  size_t count = 0;
  if (!(file >> count)) throw std::runtime_error(path + ": the first line must be a count");
  std::vector<Edge> edges;
  uint32_t head, tail, relation;
  while (file >> head >> tail >> relation) {
    edges.push_back({head, tail, relation});
    graph->entities = std::max<size_t>(graph->entities, std::max(head, tail) + size_t{1});
    graph->relations = std::max<size_t>(graph->relations, relation + size_t{1});
  }
  if (edges.size() != count) {
    throw std::runtime_error(path + ": the first line says " + std::to_string(count) +
                             " triples, the file has " + std::to_string(edges.size()));
  }
  return edges;
}

std::vector<Edge> ReadTriples(const std::string& path, Graph* graph) {
  std::vector<Edge> edges;
  if (path.empty()) return edges;
  std::ifstream file = Open(path);
  std::string line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    const size_t first = line.find('\t');
    const size_t second = first == std::string::npos ? first : line.find('\t', first + 1);
    if (second == std::string::npos) {
      throw std::runtime_error(path + ":" + std::to_string(number) +
                               ": expected head, relation and tail, separated by tabs");
    }
    const std::string_view text(line);
    const std::string_view rest = text.substr(second + 1);
    edges.push_back({graph->entity_names.Id(text.substr(0, first)),
                     graph->entity_names.Id(rest.substr(0, rest.find('\t'))),
                     graph->relation_names.Id(text.substr(first + 1, second - first - 1))});
  }
  return edges;
}

}  // namespace

uint32_t Names::Id(std::string_view name) {
  const auto [place, is_new] = ids_.try_emplace(std::string(name), names_.size());
  if (is_new) names_.emplace_back(name);
  return place->second;
}

int64_t Names::Find(std::string_view name) const {
  const auto place = ids_.find(std::string(name));
  return place == ids_.end() ? -1 : static_cast<int64_t>(place->second);
}

Graph ReadOpenKe(const std::string& folder) {
  Graph graph;
  graph.title = folder;
  graph.train = ReadNumbers(folder + "/train2id.txt", &graph);
  graph.valid = ReadNumbers(folder + "/valid2id.txt", &graph);
  graph.test = ReadNumbers(folder + "/test2id.txt", &graph);
  ReadNames(folder + "/entity2id.txt", &graph.entity_names);
  ReadNames(folder + "/relation2id.txt", &graph.relation_names);
  graph.entities = std::max(graph.entities, graph.entity_names.size());
  graph.relations = std::max(graph.relations, graph.relation_names.size());
  return graph;
}

Graph ReadTsv(const std::string& train, const std::string& valid, const std::string& test) {
  Graph graph;
  graph.title = train;
  graph.train = ReadTriples(train, &graph);
  graph.valid = ReadTriples(valid, &graph);
  graph.test = ReadTriples(test, &graph);
  graph.entities = graph.entity_names.size();
  graph.relations = graph.relation_names.size();
  return graph;
}

void HoldOut(double share, uint64_t seed, Graph* graph) {
  std::vector<Edge>& edges = graph->train;
  std::vector<uint32_t> degree(graph->entities);
  std::vector<uint32_t> uses(graph->relations);
  for (const Edge& edge : edges) {
    ++degree[edge.head];
    ++degree[edge.tail];
    ++uses[edge.relation];
  }
  const size_t wanted = static_cast<size_t>(share * static_cast<double>(edges.size()));
  std::vector<bool> held(edges.size());
  const Permutation order(edges.size(), Stream(seed, 'h', 0));
  size_t count = 0;
  for (size_t i = 0; i < edges.size() && count < wanted; ++i) {
    const size_t place = order(i);
    const Edge& edge = edges[place];
    // A loop counts twice at its node, so it needs three.
    const uint32_t least = edge.head == edge.tail ? 3 : 2;
    if (degree[edge.head] < least || degree[edge.tail] < least || uses[edge.relation] < 2) continue;
    --degree[edge.head];
    --degree[edge.tail];
    --uses[edge.relation];
    held[place] = true;
    ++count;
  }
  std::vector<Edge> kept;
  for (size_t i = 0; i < edges.size(); ++i) (held[i] ? graph->test : kept).push_back(edges[i]);
  edges = std::move(kept);
}

}  // namespace kge
