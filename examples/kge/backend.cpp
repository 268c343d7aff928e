#include "backend.h"

namespace kge {

TableShape ShapeOf(Table table, const Graph& graph, const Options& options) {
  if (table == Table::kEntity) return {"entity", graph.entities, options.init};
  return {"relation", graph.relations * (options.reciprocal ? 2 : 1), options.init};
}

frugal_optimizer OptimizerOf(const Options& options) {
  frugal_optimizer optimizer;
  frugal_optimizer_init(&optimizer);
  optimizer.kind = options.optimizer;
  optimizer.lr = options.lr;
  return optimizer;
}

size_t StateFloats(const Options& options) {
  switch (options.optimizer) {
    case FRUGAL_ADAGRAD: return options.dim;
    case FRUGAL_ROWWISE_ADAGRAD: return 1;
    case FRUGAL_ADAM: return 2 * size_t{options.dim};
    default: return 0;
  }
}

}  // namespace kge
