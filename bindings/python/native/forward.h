// A module's forward, and what its backward leaves to the optimizer's step.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "frugal.h"
#include "python.h"

namespace frugal_torch {

constexpr Py_ssize_t kMostHeld = 64;     // _gradient._MOST_HELD
constexpr int64_t kMostWeighed = 16384;  // _lookup._CHUNK

// Of a module with one table: what does not change from call to call.
struct Forward {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  decltype(&frugal_lookup) lookup_call;
  decltype(&frugal_step_begin) begin_call;
  decltype(&frugal_read) read_call;
  frugal_engine* engine;
  frugal_table* table_handle;
  int64_t dim;
  uint64_t padding_key;
  int32_t pooling;  // none, of bags: their maximum, which is taken here
  bool bags, padded;
  bool shows_written;  // the row of padding_key, once somebody has written it
  PyObject *lookup, *table, *steps, *anchor;
  PyObject* places;  // Lookup.places[0]
  PyObject* first;   // the anchor's name among the module's parameters
  // Of the steps' _native.Trainer, which is another one after a move.
  PyObject *native, *turn;
  frugal_trainer* trainer;
  int64_t slice;  // milliseconds that a call may wait before Python looks around
  // The offsets of the last call, with the last; those of the next may be the same.
  at::Tensor ends;
  int64_t length;  // of each bag, if keys were 2-D, or else -1
};

inline const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// Whether it is a tensor in the CPU's memory and nothing more: no wrapper, no view of another sign.
inline bool is_plain(const at::Tensor& tensor) {
  static const c10::DispatchKeySet usual =
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU});
  return tensor.key_set() - usual == c10::DispatchKeySet(c10::DispatchKey::CPU) &&
         tensor.layout() == at::kStrided;
}

// Whether a mode of Python's sees calls of functions. A program's default device is one that has no
// part in what is done here.
inline bool is_watched() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != classes.default_device) return true;
  }
  return false;
}

// Whether nobody looks at PyTorch's operations: no tracer, no mode of Python's, no transform.
// Autocast casts nothing of a lookup. Where a graph is recorded, it is one that can be kept.
inline bool is_usual_mode() {
  const bool inference = c10::InferenceMode::is_enabled();
  if (inference && c10::GradMode::is_enabled()) return false;
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  const auto excluded = tls.excluded_ - c10::default_excluded_set;
  return (tls.included_ - c10::default_included_set - c10::autocast_dispatch_keyset).empty() &&
         (inference ? excluded - c10::autograd_dispatch_keyset : excluded).empty() && !is_watched();
}

// References to Python's object of a gradient that nobody else has: PyTorch's versions differ.
inline Py_ssize_t references() {
  static const Py_ssize_t count = [] {
    const at::Tensor made = at::detail::empty_cpu({1}, at::kFloat), also = made;
    const Ref seen(THPVariable_Wrap(made));
    return Py_REFCNT(seen.get());
  }();
  return count;
}

// Whether it is a view of all of another tensor that is still there: perhaps the caller's.
inline bool shows_all(const at::Tensor& grad) {
  if (!grad.has_storage() || grad.storage().use_count() < 2) return false;
  return grad.storage().nbytes() == grad.nbytes();
}

struct Backward : torch::autograd::Node {
  // `own`: nobody else has the keys.
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

  // Compiled autograd makes a graph of what stands for this in Python: an addition and its hook.
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

// Does what Anchor.hold does, if nothing stands in the way. `shared`: somebody else has the
// gradient, who may use its memory again.
inline bool Backward::hold(const at::Tensor& grad, bool shared) const {
  const Ref hooks = get(of->anchor, names.hooks), owner = get(of->table, names.owner),
            adding = get(of->anchor, names.adding);
  if (integer(get(of->steps, names.world_size)) != 1) return false;
  if (!hooks || !owner || !adding || PyObject_Size(hooks.get()) != 0 || owner.get() == Py_None)
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
  // Nobody is adding, and from here on nobody comes in: there is the GIL, and no Python is run.
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

// Throws the error that Python has set.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw std::move(error);
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
    addition = input_metadata(0).zeros_like().add(tensor_of(of->anchor)).grad_fn();
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
  const bool shared = Py_REFCNT(seen.get()) > references() || shows_all(grad);
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

// Whether an attribute of a module is None or False. `absent`: what it is, if it is not its own.
inline bool is_off(PyObject* dict, PyObject* name, bool absent) {
  PyObject* found = in(dict, name);
  return found ? found == Py_None || found == Py_False : absent;
}

inline bool is_tensor(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass;
}

// Whether the library can take its memory, and a backward keep it that is to come.
inline bool is_usual(const at::Tensor& tensor, bool training) {
  return is_plain(tensor) && tensor.is_contiguous() && !(training && tensor.is_inference());
}

// Keys, or offsets, as the library takes them. Nothing, if they are not usual.
inline at::Tensor keys_of(PyObject* object, bool training) {
  if (!is_tensor(object)) return {};
  const at::Tensor& tensor = tensor_of(object);
  if (!is_usual(tensor, training)) return {};
  if (tensor.scalar_type() == at::kInt) return tensor.to(at::kLong);
  return tensor.scalar_type() == at::kLong ? tensor : at::Tensor();
}

// Factors of these keys, as the library takes them. Nothing, if they are not usual.
inline at::Tensor weights_of(PyObject* object, const at::Tensor& keys, bool training) {
  if (!THPVariable_CheckTypeExact(Py_TYPE(object))) return {};
  const at::Tensor& tensor = tensor_of(object);
  const bool usual = is_usual(tensor, training) && tensor.scalar_type() == at::kFloat &&
                     tensor.sizes() == keys.sizes() && !tensor._fw_grad(0).defined();
  return usual ? tensor : at::Tensor();
}

// Whether the module is as it was made. `has_last`: its offsets end with the number of keys.
inline bool is_usual(const Forward& self, PyObject* module, bool* has_last) {
  const Ref dict(PyObject_GenericGetDict(module, nullptr));
  if (!dict || !is_off(dict.get(), names._instead, true) ||
      !is_off(dict.get(), names.max_norm, false) ||
      !is_off(dict.get(), names.scale_grad_by_freq, false) ||
      in(dict.get(), names._lookup) != self.lookup)
    return false;
  *has_last = self.bags && !is_off(dict.get(), names.include_last_offset, false);
  PyObject* parameters = in(dict.get(), names._parameters);
  if (!parameters || !PyDict_Check(parameters) || in(parameters, self.first) != self.anchor)
    return false;
  const at::Tensor& anchor = tensor_of(self.anchor);
  if (anchor.scalar_type() != at::kFloat) return false;
  return integer(get(self.anchor, names.seen)) == static_cast<int64_t>(anchor._version());
}

// The trainer, as it is now.
inline bool look(Forward& self) {
  Ref native = get(self.steps, names.native);
  if (!native) return false;
  if (native.get() == self.native) return self.trainer != nullptr;
  Ref turn = get(native, names._turn);
  const Ref on_gpu = get(native, names.on_gpu), handle = get(native, names._handle),
            slice = get(native, names._slice);
  if (!turn || !on_gpu || !handle || !slice) return false;
  self.slice = integer(slice);
  self.trainer = on_gpu.get() == Py_False ? handle_of<frugal_trainer>(handle) : nullptr;
  Py_XSETREF(self.native, native.give());
  Py_XSETREF(self.turn, turn.give());
  return self.trainer != nullptr;
}

// Whether an attribute is a list without elements, or False.
inline bool is_none_of(PyObject* object, PyObject* name) {
  const Ref found = get(object, name);
  return found && PyObject_IsTrue(found.get()) == 0;
}

// Does what Steps.begin does, if nothing waits to be done before. False: an error is set.
inline bool begin(PyObject* steps, PyObject* turns, decltype(&frugal_step_begin) step_begin,
                  frugal_trainer* trainer, int64_t slice) {
  if (is_none_of(steps, names._cancelled) && is_none_of(steps, names._dropped) &&
      is_none_of(steps, names._interrupted)) {
    const int64_t next = integer(get(steps, names.next));
    int32_t status = FRUGAL_ERR_TIMEOUT;
    if (const Turn turn(turns); next >= 0 && turn.mine()) {
      const pybind11::gil_scoped_release others;
      status = step_begin(trainer, static_cast<uint64_t>(next), slice);
    }
    if (status == FRUGAL_OK) return PyObject_SetAttr(steps, names.open, Py_True) == 0;
    if (status != FRUGAL_ERR_TIMEOUT) {
      const Ref number(PyLong_FromLong(status));
      call(steps, names.refused, number.get());  // which raises
      return false;
    }
  }
  // Which has words for who waits long.
  return !PyErr_Occurred() && static_cast<bool>(call(steps, names.begin));
}

// When rows are read that are read now (Moment of _steps).
inline Ref moment_of(PyObject* steps) {
  const Ref next = get(steps, names.next), writes = get(steps, names.writes);
  return next && writes ? Ref(PyTuple_Pack(2, next.get(), writes.get())) : Ref();
}

// Rows. `training`: of the step, which begins, if it has not begun. Nothing, if that is not usual;
// an error of Python's may be set. `moment`: becomes when they were read.
inline at::Tensor look_up(Forward& self, frugal_op& op, at::IntArrayRef shape, bool training,
                          Ref& moment) {
  const Locked locked(self.steps);
  if (!locked.mine() || !look(self)) return {};
  const Ref untold = get(self.steps, names._untold), open = get(self.steps, names.open);
  if (!open || untold.get() != Py_None) return {};
  if (training && open.get() != Py_True &&
      !begin(self.steps, self.turn, self.begin_call, self.trainer, self.slice))
    return {};
  at::Tensor out = at::detail::empty_cpu(shape, at::kFloat);
  op.rows_out = out.mutable_data_ptr<float>();
  int32_t status;
  {
    const Turn turn(self.turn);
    if (!turn.mine()) return {};
    const pybind11::gil_scoped_release others;
    status = training ? self.lookup_call(self.trainer, &op, 1)
                      : self.read_call(self.engine, self.trainer, &op, 1, self.slice);
  }
  if (status == FRUGAL_OK) {
    moment = moment_of(self.steps);
    return moment ? out : at::Tensor();
  }
  // Python waits for longer, and has words for it.
  if (!training && status == FRUGAL_ERR_TIMEOUT) return {};
  const Ref number(PyLong_FromLong(status));
  call(self.steps, names.refused, number.get());  // which raises
  return {};
}

// Offsets that are kept for the next calls, whatever the mode of this one.
inline at::Tensor new_ends(int64_t bags) {
  const c10::InferenceMode kept(false);
  return at::detail::empty_cpu({bags + 1}, at::kLong);
}

// Offsets with the last, which is the number of keys, of so many bags that begin there.
inline at::Tensor ends_of(Forward& self, const at::Tensor& begins, int64_t bags, int64_t count) {
  const size_t bytes = sizeof(int64_t) * static_cast<size_t>(bags);
  at::Tensor ends = self.ends;
  if (!ends.defined() || ends.numel() != bags + 1 ||
      ends.const_data_ptr<int64_t>()[bags] != count ||
      std::memcmp(ends.const_data_ptr(), begins.const_data_ptr(), bytes) != 0) {
    ends = new_ends(bags);
    std::memcpy(ends.mutable_data_ptr(), begins.const_data_ptr(), bytes);
    ends.mutable_data_ptr<int64_t>()[bags] = count;
    self.ends = ends;
    self.length = -1;
  }
  return ends;
}

// The same of bags that are this long.
inline at::Tensor ends_of(Forward& self, int64_t bags, int64_t length) {
  at::Tensor ends = self.ends;
  if (!ends.defined() || ends.numel() != bags + 1 || self.length != length) {
    ends = new_ends(bags);
    for (int64_t bag = 0; bag <= bags; ++bag) ends.mutable_data_ptr<int64_t>()[bag] = bag * length;
    self.ends = ends;
    self.length = length;
  }
  return ends;
}

// What stands behind the rows' node, where factors want a gradient: WeightedRows in Python.
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

// Whether offsets with the last are those of bags of so many keys. Others the library refuses,
// where it gets them.
inline bool are_ends(const at::Tensor& ends, int64_t count) {
  const auto* begin = ends.const_data_ptr<int64_t>();
  const auto* end = begin + ends.numel();
  return begin != end && *begin == 0 && *(end - 1) == count && std::is_sorted(begin, end);
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
  Ref now = moment_of(self.steps);
  if (!now || PyObject_RichCompareBool(now.get(), moment, Py_EQ) != 1) return {};
  frugal_op op{};
  op.struct_size = sizeof op;
  op.table = self.table_handle;
  op.keys = static_cast<const uint64_t*>(keys.const_data_ptr());
  op.count = static_cast<size_t>(keys.numel());
  const at::Tensor rows = look_up(self, op, {keys.numel(), self.dim}, false, now);
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

// The maximum of each bag's rows, of keys that are not padding: PyTorch's own gather of elements
// that are chosen here as its embedding_bag chooses them. Of equals it takes the first, and a NaN
// only if it comes first.
inline at::Tensor largest(const Forward& self, const at::Tensor& keys, const at::Tensor& ends,
                          const at::Tensor& rows) {
  const int64_t bags = ends.numel() - 1, dim = self.dim;
  const auto* key = static_cast<const uint64_t*>(keys.const_data_ptr());
  const auto* end = ends.const_data_ptr<int64_t>();
  const auto* value = rows.const_data_ptr<float>();
  const at::Tensor places = at::detail::empty_cpu({bags, dim}, at::kLong);
  at::Tensor empty;  // which bags have no key
  auto* place = places.mutable_data_ptr<int64_t>();
  for (int64_t bag = 0; bag < bags; ++bag, place += dim) {
    bool some = false;
    for (int64_t i = end[bag]; i < end[bag + 1]; ++i) {
      if (self.padded && key[i] == self.padding_key) continue;
      if (!some) std::fill_n(place, dim, i);
      some = true;
      for (int64_t at = 0; at < dim; ++at)
        if (value[i * dim + at] > value[place[at] * dim + at]) place[at] = i;
    }
    if (some) continue;
    std::fill_n(place, dim, 0);
    if (!empty.defined()) empty = at::zeros({bags, 1}, at::device(at::kCPU).dtype(at::kBool));
    empty.mutable_data_ptr<bool>()[bag] = true;
  }
  const at::Tensor out = rows.gather(0, places);
  return empty.defined() ? out.masked_fill(empty, 0.0) : out;
}

inline PyObject* forward(Forward& self, PyObject* module, PyObject* input, PyObject* offsets,
                         PyObject* per_sample_weights) {
  bool has_last = false;
  if (!is_usual_mode() || !is_usual(self, module, &has_last)) return not_usual();
  const bool graph = c10::GradMode::is_enabled(),
             training = graph && tensor_of(self.anchor).requires_grad(),
             maximum = self.bags && self.pooling == FRUGAL_POOL_NONE;
  const at::Tensor keys = keys_of(input, training);
  if (!keys.defined()) return not_usual();
  c10::SmallVector<int64_t, 5> shape;
  at::Tensor ends, weights;
  if (self.bags) {
    if (keys.dim() == 2 && offsets == Py_None) {
      ends = ends_of(self, keys.size(0), keys.size(1));
    } else {
      const at::Tensor begins = keys_of(offsets, training);
      if (keys.dim() != 1 || !begins.defined() || begins.dim() != 1) return not_usual();
      const int64_t bags = begins.numel() - has_last;
      if (bags <= 0) return not_usual();
      if (has_last && begins.const_data_ptr<int64_t>()[bags] != keys.numel()) return not_usual();
      ends = ends_of(self, begins, bags, keys.numel());
    }
    if (maximum && (keys.numel() == 0 || !are_ends(ends, keys.numel()))) return not_usual();
    shape.push_back(maximum ? keys.numel() : ends.numel() - 1);
  } else {
    // An anchor's shape has two dimensions.
    if (training && keys.dim() == 0) return not_usual();
    shape.append(keys.sizes().begin(), keys.sizes().end());
  }
  shape.push_back(self.dim);
  if (per_sample_weights != Py_None) {
    weights = weights_of(per_sample_weights, keys, training);
    if (!weights.defined() || self.pooling != FRUGAL_POOL_SUM) return not_usual();
  }

  frugal_op op{};
  op.struct_size = sizeof op;
  op.table = self.table_handle;
  op.pooling = self.pooling;
  op.keys = static_cast<const uint64_t*>(keys.const_data_ptr());
  op.count = static_cast<size_t>(keys.numel());
  const at::Tensor pooled = maximum ? at::Tensor() : ends;
  if (pooled.defined()) {
    op.offsets = static_cast<const uint64_t*>(pooled.const_data_ptr());
    op.bags = static_cast<size_t>(pooled.numel() - 1);
  }
  if (weights.defined()) op.weights = weights.const_data_ptr<float>();
  op.row_stride = sizeof(float) * static_cast<size_t>(self.dim);
  bool shown = !self.padded;  // the padding's row
  if (self.shows_written) {
    const Ref written = get(self.table, names.written);
    if (!written) return nullptr;
    shown = written.get() == Py_True;
  }
  if (!shown) {
    op.padding_key = self.padding_key;
    op.flags = FRUGAL_OP_PADDING;
  }
  Ref moment;
  at::Tensor out = look_up(self, op, shape, training, moment);
  if (!out.defined()) return not_usual();
  if (training) {
    const std::shared_ptr<Backward> node(
        new Backward(torch::autograd::collect_next_edges(tensor_of(self.anchor)), &self, keys,
                     !keys.is_same(tensor_of(input)), pooled, weights),
        torch::autograd::deleteNode);
    torch::autograd::set_history(out, node);
  }
  if (maximum) out = largest(self, keys, ends, out);
  if (graph && weights.defined() && weights.requires_grad()) {
    const std::shared_ptr<WeightsBackward> node(
        new WeightsBackward(torch::autograd::collect_next_edges(out, weights), &self,
                            std::move(moment), keys, ends, weights),
        torch::autograd::deleteNode);
    torch::autograd::set_history(out, node);
  }
  return THPVariable_Wrap(std::move(out));
}

// Forward(...)(module, input, offsets, per_sample_weights)
inline PyObject* forward_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(flags) != 4) return not_usual();
  return forward(*reinterpret_cast<Forward*>(self), arguments[0], arguments[1], arguments[2],
                 arguments[3]);
  END_HANDLE_TH_ERRORS
}

inline PyObject* forward_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  unsigned long long lookup_call, begin_call, read_call, engine, table, padding_key;
  long long dim;
  int pooling, bags, padded, shows_written;
  PyObject* objects[6];
  if (!PyArg_ParseTuple(arguments, "KKKKKLiKpppOOOOOO", &lookup_call, &begin_call, &read_call,
                        &engine, &table, &dim, &pooling, &padding_key, &bags, &padded,
                        &shows_written, &objects[0], &objects[1], &objects[2], &objects[3],
                        &objects[4], &objects[5]))
    return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  auto* self = reinterpret_cast<Forward*>(made);
  new (&self->ends) at::Tensor();
  self->vectorcall = forward_call;
  self->lookup_call = reinterpret_cast<decltype(&frugal_lookup)>(lookup_call);
  self->begin_call = reinterpret_cast<decltype(&frugal_step_begin)>(begin_call);
  self->read_call = reinterpret_cast<decltype(&frugal_read)>(read_call);
  self->engine = reinterpret_cast<frugal_engine*>(engine);
  self->table_handle = reinterpret_cast<frugal_table*>(table);
  self->dim = dim;
  self->pooling = pooling;
  self->padding_key = padding_key;
  self->bags = bags;
  self->padded = padded;
  self->shows_written = shows_written;
  self->length = -1;
  for (PyObject* each : objects) Py_INCREF(each);
  self->lookup = objects[0];
  self->table = objects[1];
  self->steps = objects[2];
  self->anchor = objects[3];
  self->places = objects[4];
  self->first = objects[5];
  return made;
}

inline int forward_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Forward*>(object);
  for (PyObject* each : {self->lookup, self->table, self->steps, self->anchor, self->places,
                         self->first, self->native, self->turn})
    Py_VISIT(each);
  return 0;
}

inline void forward_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Forward*>(object);
  for (PyObject* each : {self->lookup, self->table, self->steps, self->anchor, self->places,
                         self->first, self->native, self->turn})
    Py_XDECREF(each);
  self->ends.~Tensor();
  Py_TYPE(object)->tp_free(object);
}

inline PyTypeObject forward_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline bool make_forward_type() {
  forward_type.tp_name = "frugal.torch.Forward";
  forward_type.tp_doc = "Called with a module and its inputs: its forward, or None.";
  forward_type.tp_basicsize = sizeof(Forward);
  forward_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  forward_type.tp_vectorcall_offset = offsetof(Forward, vectorcall);
  forward_type.tp_call = PyVectorcall_Call;
  forward_type.tp_new = forward_new;
  forward_type.tp_traverse = forward_traverse;
  forward_type.tp_dealloc = forward_dealloc;
  return PyType_Ready(&forward_type) == 0;
}

}  // namespace frugal_torch
