// Gradients of the factors of keys.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>

#include "rows.h"

namespace frugal_torch {

constexpr int64_t kMostWeighed = 16384;  // _lookup._CHUNK

// The node after that of the rows, if factors need a gradient. In Python it is WeightedRows.
struct WeightsBackward : torch::autograd::Node {
  WeightsBackward(torch::autograd::edge_list&& edges, Forward* of, Ref&& moment,
                  const at::Tensor& keys, const at::Tensor& ends, const at::Tensor& weights)
      : Node(std::move(edges)),
        of(of),
        moment(moment.give()),
        keys(keys, false),
        ends(ends, false),
        weights(weights, false) {
    Py_INCREF(of);
  }
  ~WeightsBackward() override {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(of);
    Py_DECREF(moment);
  }
  std::string name() const override { return "FrugalWeightsBackward"; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* each : {&keys, &ends, &weights}) each->reset_data();
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

  // Compiled autograd makes a graph of what does the same in Python.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    same = in_python(keys.unpack(), ends.unpack(), weights.unpack());
    same->compiled_args(args);
  }
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& saved) override {
    return of_both(same->apply_with_saved(grads, saved));
  }

  std::shared_ptr<Node> in_python(const at::Tensor& of_keys, const at::Tensor& of_ends,
                                  const at::Tensor& of_weights) const;
  // Of the gradients of all that Python's node gets.
  static torch::autograd::variable_list of_both(const torch::autograd::variable_list& grads) {
    return {grads.front(), grads.back()};
  }

  Forward* const of;
  PyObject* const moment;  // of the rows
  torch::autograd::SavedVariable keys, ends, weights;
  mutable std::shared_ptr<Node> same;
};

inline std::shared_ptr<torch::autograd::Node> WeightsBackward::in_python(
    const at::Tensor& of_keys, const at::Tensor& of_ends, const at::Tensor& of_weights) const {
  const c10::AutoGradMode recording(true);
  const at::Tensor rows = input_metadata(0).zeros_like();
  if (next_edge(0).is_valid()) torch::autograd::impl::set_gradient_edge(rows, next_edge(0));
  pybind11::gil_scoped_acquire gil;
  const Ref given[] = {Ref(THPVariable_Wrap(rows)), Ref(THPVariable_Wrap(of_keys)),
                       Ref(THPVariable_Wrap(of_ends)), Ref(THPVariable_Wrap(of_weights))};
  const Ref out = call(of->lookup, names.weighted_rows, given[0].get(), moment, given[1].get(),
                       given[2].get(), given[3].get());
  if (!out) raise();
  return tensor_of(out.get()).grad_fn();
}

// The gradient of factors as Lookup._weight_grad computes it. Nothing, if that is not usual; an
// error of Python's may be set.
inline at::Tensor weight_grad(Forward& self, PyObject* moment, const at::Tensor& grad,
                              const at::Tensor& keys, const at::Tensor& ends) {
  if (!grad.defined() || c10::GradMode::is_enabled() || !is_plain(grad) ||
      (self.dim > 1 && grad.stride(1) != 1) || keys.numel() > kMostWeighed)
    return {};
  // A program's hooks of saved tensors may have made others of them.
  if (!is_usual(keys, false) || !is_usual(ends, false) || keys.scalar_type() != at::kLong ||
      ends.scalar_type() != at::kLong || ends.numel() != grad.size(0) + 1 ||
      !are_ends(ends, keys.numel()))
    return {};
  const Ref now = moment_of(self.steps);
  if (!now || PyObject_RichCompareBool(now.get(), moment, Py_EQ) != 1) return {};
  frugal_op op{};
  op.struct_size = sizeof op;
  op.table = self.table_handle;
  op.keys = static_cast<const uint64_t*>(keys.const_data_ptr());
  op.count = static_cast<size_t>(keys.numel());
  const at::Tensor rows = look_up(self, op, {keys.numel(), self.dim}, false, nullptr);
  if (!rows.defined()) return {};
  const auto* end = ends.const_data_ptr<int64_t>();
  const auto* of_bag = grad.const_data_ptr<float>();
  auto* row = rows.mutable_data_ptr<float>();
  for (int64_t bag = 0; bag + 1 < ends.numel(); ++bag, of_bag += grad.stride(0))
    for (int64_t i = end[bag]; i < end[bag + 1]; ++i, row += self.dim)
      for (int64_t at = 0; at < self.dim; ++at) row[at] *= of_bag[at];
  at::Tensor out = rows.sum(1);
  if (self.padded)  // bags leave it out, whatever its row is
    for (int64_t i = 0; i < keys.numel(); ++i)
      if (op.keys[i] == self.padding_key) out.mutable_data_ptr<float>()[i] = 0.0f;
  return out.view(keys.sizes());
}

inline torch::autograd::variable_list WeightsBackward::apply(
    torch::autograd::variable_list&& grads) {
  at::Tensor of_keys, of_ends, of_weights;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    of_keys = keys.unpack();
    of_ends = ends.unpack();
    of_weights = weights.unpack();
  }
  {
    pybind11::gil_scoped_acquire gil;
    const at::Tensor found = weight_grad(*of, moment, grads[0], of_keys, of_ends);
    if (found.defined()) return {next_edge(0).is_valid() ? grads[0] : at::Tensor(), found};
    if (PyErr_Occurred()) raise();
  }
  return of_both((*in_python(of_keys, of_ends, of_weights))(std::move(grads)));
}

}  // namespace frugal_torch
