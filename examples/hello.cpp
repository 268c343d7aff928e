// Frugal in one page of C++: open an engine, train two rows for ten steps, read them.
//   c++ -std=c++17 hello.cpp $(pkg-config --cflags --libs frugal) -o hello && ./hello
// The same program in other languages: hello.c, hello.py, hello.rs, hello.jl.
#include <cstdio>
#include <frugal.hpp>
#include <vector>

int main() try {
  // An engine with all defaults: one rank, keys declared up to ten steps ahead.
  frugal::Engine engine;

  // A table of 1000 rows of 4 floats, all zeros, trained by SGD.
  auto config = frugal::TableConfig("items", /*rows=*/1000, /*dim=*/4);
  config.optimizer.lr = 0.1f;
  frugal::Table table = engine.CreateTable(config);
  frugal::Trainer trainer = engine.CreateTrainer();

  // Rows 7 and 42 learn to be ones. Key 7 comes twice: its gradients are summed.
  const std::vector<uint64_t> keys = {7, 42, 7};
  std::vector<float> rows(keys.size() * table.dim()), grads(rows.size());
  frugal::Batch batch = trainer.Prefetch(0, table, keys);
  for (uint64_t step = 0; step < 10; ++step) {
    // What the next step needs is brought up to date while this one computes.
    frugal::Batch next = trainer.Prefetch(step + 1, table, keys);
    trainer.StepBegin(step);
    trainer.Lookup(batch, rows);
    double loss = 0;  // half the squared distance from one, whose gradient is row - 1
    for (size_t i = 0; i < rows.size(); ++i) {
      grads[i] = rows[i] - 1.0f;
      loss += 0.5 * grads[i] * grads[i];
    }
    trainer.PushGrad(batch, grads);
    trainer.StepEnd(step);
    std::printf("step %d: loss %.6f\n", static_cast<int>(step), loss);
    batch = std::move(next);
  }

  // Outside steps rows are read by their keys.
  const frugal::Span<const uint64_t> both(keys.data(), 2);
  table.Get(both, rows);
  for (size_t i = 0; i < both.size(); ++i) {
    std::printf("row %d:", static_cast<int>(both[i]));
    for (size_t c = 0; c < table.dim(); ++c) std::printf(" %.6f", rows[i * table.dim() + c]);
    std::printf("\n");
  }
} catch (const frugal::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
