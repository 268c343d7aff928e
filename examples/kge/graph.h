// Knowledge graphs and where they are read from.
#ifndef FRUGAL_EXAMPLES_KGE_GRAPH_H_
#define FRUGAL_EXAMPLES_KGE_GRAPH_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kge {

struct Edge {
  uint32_t head;
  uint32_t tail;
  uint32_t relation;

  bool operator==(const Edge&) const = default;
};

// Gives numbers to names in order of first appearance.
class Names {
 public:
  uint32_t Id(std::string_view name);
  // Returns: the id, or -1 for a name that never came.
  int64_t Find(std::string_view name) const;
  const std::string& operator[](size_t id) const { return names_[id]; }
  size_t size() const { return names_.size(); }

 private:
  std::unordered_map<std::string, uint32_t> ids_;
  std::vector<std::string> names_;
};

struct Graph {
  std::string title;
  size_t entities = 0;
  size_t relations = 0;
  Names entity_names;    // empty where the input has numbers only
  Names relation_names;  // likewise
  std::vector<Edge> train;
  std::vector<Edge> valid;
  std::vector<Edge> test;
};

// An OpenKE folder: train2id.txt, valid2id.txt, test2id.txt, each a line with the count and then
// `head tail relation` lines; entity2id.txt and relation2id.txt begin with a count as well.
Graph ReadOpenKe(const std::string& folder);

// Tab-separated triples `head relation tail` of names. Without files for validation and test a
// share of the edges can be held out by HoldOut.
Graph ReadTsv(const std::string& train, const std::string& valid, const std::string& test);

// The package lists of this machine: what `apt-cache dumpavail` prints or, if that is nothing, the
// installed packages of /var/lib/dpkg/status. All edges are in `train`.
Graph ReadDebian();

// Moves about `share` of the training edges to the test edges, the same ones for the same seed.
// Every node and every relation keeps at least one training edge.
void HoldOut(double share, uint64_t seed, Graph* graph);

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_GRAPH_H_
