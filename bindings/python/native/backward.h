// What a forward's backward leaves to the optimizer's step.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>

#include "rows.h"

namespace frugal_torch {

constexpr Py_ssize_t kMostHeld = 64;  // _gradient._MOST_HELD

// The count of references to a gradient's Python object that has no other owner. PyTorch's versions
// differ in it, so it is found when the module is loaded.
inline constinit Py_ssize_t references = 0;
inline void count_references() {
  const at::Tensor made = at::detail::empty_cpu({1}, at::kFloat), also = made;
  const Ref seen(THPVariable_Wrap(made));
  references = Py_REFCNT(seen.get());
}

// Whether it is a view of all of another tensor that is still there: perhaps the caller's.
inline bool shows_all(const at::Tensor& grad) {
  if (!grad.has_storage() || grad.storage().use_count() < 2) return false;
  return grad.storage().nbytes() == grad.nbytes();
}

struct Backward : torch::autograd::Node {
  // `own`: no other tensor shares the memory of the keys.
  Backward(torch::autograd::edge_list&& edges, Forward* of, const at::Tensor& keys, bool own,
           const at::Tensor& ends, const at::Tensor& weights)
      : Node(std::move(edges)),
        of(of),
        keys(keys),
        ends(ends),
        weights(weights),
        version(writes()),
        own(own) {
    Py_INCREF(of);
  }
  ~Backward() override {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(of);
  }
  std::string name() const override { return "FrugalBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

  // Compiled autograd makes a graph of an addition and its hook, which do the same in Python.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& saved) override {
    return {addition->apply_with_saved(grads, saved).back()};
  }

  // How often what the caller may have has been written to in place.
  uint32_t writes() const { return keys._version() + (weights.defined() ? weights._version() : 0); }
  bool is_usual(const at::Tensor& grad) const;
  bool hold(const at::Tensor& grad, bool shared) const;
  Ref in_python() const;
  at::Tensor by_python(const at::Tensor& grad, bool shared) const;

  Forward* const of;
  at::Tensor keys, ends, weights;
  const uint32_t version;  // writes() at the forward
  const bool own;
  bool freed = false;
  mutable std::shared_ptr<Node> addition;
};

// Whether the gradient can be held as it is, and what runs adds it to the anchor's.
inline bool Backward::is_usual(const at::Tensor& grad) const {
  if (freed || c10::GradMode::is_enabled() || !is_plain(grad) || grad.scalar_type() != at::kFloat ||
      grad.dim() != 2 || writes() != version)
    return false;
  const int64_t rows = grad.size(0), columns = grad.size(1);
  const bool contiguous = columns == 1 || grad.stride(1) == 1;
  if (!contiguous || (rows > 1 && grad.stride(0) < columns)) return false;
  // As _anchor.use_of says: the leaf is ACCUMULATED.
  auto* leaf = next_edge(0).function.get();
  const auto* there = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (!there || !info || !there->count(leaf)) return false;
  if (!info->empty()) {
    const auto found = info->find(leaf);
    if (found == info->end() || !found->second.should_execute() || found->second.captures_)
      return false;
  }
  return tensor_of(of->anchor).requires_grad();
}

inline at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return copy;
}

// Does what Anchor.hold does, or returns false. `shared`: the gradient has another owner, which may
// use its memory again.
inline bool Backward::hold(const at::Tensor& grad, bool shared) const {
  const Ref hooks = get(of->anchor, names.hooks), stepped = get(of->table, names.stepped),
            adding = get(of->anchor, names.adding);
  if (integer(get(of->steps, names.world_size)) != 1) return false;
  if (!hooks || stepped.get() != Py_True || !adding || PyObject_Size(hooks.get()) != 0)
    return false;
  const Ref numbers = get(of->steps, names.backwards);
  const Ref number(numbers ? PyIter_Next(numbers.get()) : nullptr);
  const Ref tensors(PyList_New(3));
  if (!number || !tensors) return false;
  // None, where there are none.
  PyList_SET_ITEM(tensors.get(), 0, THPVariable_Wrap(own ? keys : copy_of(keys)));
  PyList_SET_ITEM(tensors.get(), 1, THPVariable_Wrap(ends));
  PyList_SET_ITEM(tensors.get(), 2,
                  THPVariable_Wrap(weights.defined() ? copy_of(weights) : weights));
  const Ref given(THPVariable_Wrap(shared ? grad.clone() : grad)), factor(PyFloat_FromDouble(1.0));
  PyObject* of_held[] = {of->lookup, tensors.get(), given.get(), number.get()};
  const Ref held(PyObject_Vectorcall(classes.held, of_held, 4, nullptr));
  if (!held) return false;
  PyObject* of_part[] = {held.get(), of->places, factor.get()};
  const Ref part(PyObject_Vectorcall(classes.part, of_part, 3, nullptr));
  // No thread is adding, and none begins to: this thread has the GIL and runs no Python from here.
  if (!part || call(adding.get(), names.locked).get() != Py_False) return false;
  const at::Tensor& anchor = tensor_of(of->anchor);
  const bool first = !anchor.grad().defined();
  if (first && get(of->anchor, names.aside).get() != Py_None) return false;
  const Ref gradient = first ? get(of->anchor, names.begun) : Ref(THPVariable_Wrap(anchor.grad()));
  if (!is(gradient, classes.gradient)) return false;
  const Ref parts = get(gradient, names.parts), limit = get(gradient, names.clip_limit);
  if (!parts || !limit || !PyList_CheckExact(parts.get())) return false;
  if (PyFloat_AsDouble(limit.get()) != 0.0) return false;
  if (PyList_GET_SIZE(parts.get()) >= (first ? 1 : kMostHeld)) return false;
  if (PyList_Append(parts.get(), part.get()) != 0) return false;
  if (first) anchor.mutable_grad() = tensor_of(gradient.get());
  return true;
}

// What does the same in Python.
inline Ref Backward::in_python() const {
  const Ref of_keys(THPVariable_Wrap(keys)), of_ends(THPVariable_Wrap(ends)),
      of_weights(THPVariable_Wrap(weights)), of_version(PyLong_FromUnsignedLong(version)),
      leaf(torch::autograd::functionToPyObject(next_edge(0).function));
  Ref made = call(of->lookup, names.backward, of_keys.get(), of_ends.get(), of_weights.get(),
                  of_version.get(), leaf.get());
  if (!made) raise();
  return made;
}

inline void Backward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  {
    const c10::AutoGradMode recording(true);
    // It takes a number in place of the anchor, whose memory no graph may read.
    const at::Tensor number = at::zeros({1, 1}).requires_grad_(true);
    addition = input_metadata(0).zeros_like().add(number).grad_fn();
    addition->set_next_edge(1, next_edge(0));
  }
  pybind11::gil_scoped_acquire gil;
  args.add_pre_hook(c10::SafePyObject(in_python().give(), getPyInterpreter()));
  addition->compiled_args(args);
}

// Returns what autograd goes on with.
inline at::Tensor Backward::by_python(const at::Tensor& grad, bool shared) const {
  const Ref given(THPVariable_Wrap(grad)), made = in_python();
  const Ref answer = call(made.get(), names.unusual, given.get(), shared ? Py_True : Py_False);
  if (!answer) raise();
  return answer.get() == Py_None ? at::Tensor() : tensor_of(answer.get());
}

inline torch::autograd::variable_list Backward::apply(torch::autograd::variable_list&& grads) {
  at::Tensor grad = grads[0];
  if (!grad.defined()) return {at::Tensor()};
  pybind11::gil_scoped_acquire gil;
  const Ref seen(THPVariable_Wrap(grad));
  const bool shared = Py_REFCNT(seen.get()) > references || shows_all(grad);
  at::Tensor rows = grad;
  if (!of->bags && grad.dim() != 2 && is_plain(grad) && grad.is_contiguous() && grad.numel() != 0 &&
      !c10::GradMode::is_enabled())
    rows = grad.view({-1, of->dim});
  at::Tensor out;
  const bool done = is_usual(rows) && hold(rows, shared);
  if (!done) {
    if (PyErr_Occurred()) raise();
    out = by_python(grad, shared);
  }
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    keys = ends = weights = at::Tensor();
    freed = true;
  }
  return {out};
}

}  // namespace frugal_torch
