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
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "frugal.h"
#include "python.h"

namespace frugal_torch {

constexpr Py_ssize_t kMostHeld = 64;  // _gradient._MOST_HELD

// Of a module with one table: what does not change from call to call.
struct Forward {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  decltype(&frugal_lookup) lookup_call;
  decltype(&frugal_step_begin) begin_call;
  frugal_table* table_handle;
  int64_t dim;
  uint64_t padding_key;
  int32_t pooling;
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

// Whether PyTorch records a graph, and nobody looks at its operations: no tracer, no mode of
// Python's, no transform. Autocast casts nothing of a lookup.
inline bool is_recording() {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         (tls.included_ - c10::default_included_set - c10::autocast_dispatch_keyset).empty() &&
         (tls.excluded_ - c10::default_excluded_set).empty() &&
         !is_watched();
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
           const at::Tensor& ends)
      : Node(std::move(edges)), of(of), keys(keys), ends(ends), version(keys._version()), own(own) {
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

  bool is_usual(const at::Tensor& grad) const;
  bool hold(const at::Tensor& grad, bool shared) const;
  Ref in_python() const;
  at::Tensor by_python(const at::Tensor& grad, bool shared) const;

  Forward* const of;
  at::Tensor keys, ends;
  const uint32_t version;  // of keys
  const bool own;
  bool freed = false;
  mutable std::shared_ptr<Node> addition;
};

// Whether the gradient can be held as it is, and what runs adds it to the anchor's.
inline bool Backward::is_usual(const at::Tensor& grad) const {
  if (freed || c10::GradMode::is_enabled() || !is_plain(grad) || grad.scalar_type() != at::kFloat ||
      grad.dim() != 2 || keys._version() != version)
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

// Does what Anchor.hold does, if nothing stands in the way. `shared`: somebody else has the gradient,
// who may use its memory again.
inline bool Backward::hold(const at::Tensor& grad, bool shared) const {
  const Ref hooks = get(of->anchor, names.hooks), owner = get(of->table, names.owner),
            adding = get(of->anchor, names.adding);
  if (integer(get(of->steps, names.world_size)) != 1) return false;
  if (!hooks || !owner || !adding || PyObject_Size(hooks.get()) != 0 || owner.get() == Py_None)
    return false;
  at::Tensor kept = keys;
  if (!own) {
    kept = at::detail::empty_cpu(keys.sizes(), at::kLong);
    std::memcpy(kept.mutable_data_ptr(), keys.const_data_ptr(), keys.nbytes());
  }
  const Ref numbers = get(of->steps, names.backwards);
  const Ref number(numbers ? PyIter_Next(numbers.get()) : nullptr);
  const Ref tensors(PyList_New(3));
  if (!number || !tensors) return false;
  PyList_SET_ITEM(tensors.get(), 0, THPVariable_Wrap(kept));
  PyList_SET_ITEM(tensors.get(), 1, THPVariable_Wrap(ends));  // None, if there are none
  PyList_SET_ITEM(tensors.get(), 2, Py_NewRef(Py_None));
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
  const Ref gradient =
      first ? get(of->anchor, names.begun) : Ref(THPVariable_Wrap(anchor.grad()));
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
      of_version(PyLong_FromUnsignedLong(version)),
      leaf(torch::autograd::functionToPyObject(next_edge(0).function));
  Ref made = call(of->lookup, names.backward, of_keys.get(), of_ends.get(), of_version.get(),
                  leaf.get());
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
    keys = ends = at::Tensor();
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

// Keys, or offsets, as the library takes them. Nothing, if they are not usual.
inline at::Tensor keys_of(PyObject* object) {
  if (!is_tensor(object)) return {};
  const at::Tensor& tensor = tensor_of(object);
  if (!is_plain(tensor) || !tensor.is_contiguous() || tensor.is_inference()) return {};
  if (tensor.scalar_type() == at::kInt) return tensor.to(at::kLong);
  return tensor.scalar_type() == at::kLong ? tensor : at::Tensor();
}

// Whether the module is as it was made, and trains rows. `has_last`: its offsets end with the number
// of keys.
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
  if (!anchor.requires_grad() || anchor.scalar_type() != at::kFloat) return false;
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

// Begins the step, if it has not begun, and looks rows up. Nothing, if that is not usual; an error
// of Python's may be set.
inline at::Tensor look_up(Forward& self, frugal_op& op, at::IntArrayRef shape) {
  const Locked locked(self.steps);
  if (!locked.mine() || !look(self)) return {};
  const Ref untold = get(self.steps, names._untold), open = get(self.steps, names.open);
  if (!open || untold.get() != Py_None) return {};
  if (open.get() != Py_True &&
      !begin(self.steps, self.turn, self.begin_call, self.trainer, self.slice))
    return {};
  at::Tensor out = at::detail::empty_cpu(shape, at::kFloat);
  op.rows_out = out.mutable_data_ptr<float>();
  int32_t status;
  {
    const Turn turn(self.turn);
    if (!turn.mine()) return {};
    const pybind11::gil_scoped_release others;
    status = self.lookup_call(self.trainer, &op, 1);
  }
  if (status == FRUGAL_OK) return out;
  const Ref number(PyLong_FromLong(status));
  call(self.steps, names.refused, number.get());  // which raises
  return {};
}

// Offsets with the last, which is the number of keys, of so many bags that begin there.
inline at::Tensor ends_of(Forward& self, const at::Tensor& begins, int64_t bags, int64_t count) {
  const size_t bytes = sizeof(int64_t) * static_cast<size_t>(bags);
  at::Tensor ends = self.ends;
  if (!ends.defined() || ends.numel() != bags + 1 ||
      ends.const_data_ptr<int64_t>()[bags] != count ||
      std::memcmp(ends.const_data_ptr(), begins.const_data_ptr(), bytes) != 0) {
    ends = at::detail::empty_cpu({bags + 1}, at::kLong);
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
    ends = at::detail::empty_cpu({bags + 1}, at::kLong);
    for (int64_t bag = 0; bag <= bags; ++bag) ends.mutable_data_ptr<int64_t>()[bag] = bag * length;
    self.ends = ends;
    self.length = length;
  }
  return ends;
}

inline PyObject* forward(Forward& self, PyObject* module, PyObject* input, PyObject* offsets) {
  bool has_last = false;
  if (!is_recording() || !is_usual(self, module, &has_last)) return not_usual();
  const at::Tensor keys = keys_of(input);
  if (!keys.defined()) return not_usual();
  c10::SmallVector<int64_t, 5> shape;
  at::Tensor ends;
  if (self.bags) {
    if (keys.dim() == 2 && offsets == Py_None) {
      ends = ends_of(self, keys.size(0), keys.size(1));
    } else {
      const at::Tensor begins = keys_of(offsets);
      if (keys.dim() != 1 || !begins.defined() || begins.dim() != 1) return not_usual();
      const int64_t bags = begins.numel() - has_last;
      if (bags <= 0) return not_usual();
      if (has_last && begins.const_data_ptr<int64_t>()[bags] != keys.numel()) return not_usual();
      ends = ends_of(self, begins, bags, keys.numel());
    }
    shape.push_back(ends.numel() - 1);
  } else {
    if (keys.dim() == 0) return not_usual();  // an anchor's shape has two dimensions
    shape.append(keys.sizes().begin(), keys.sizes().end());
  }
  shape.push_back(self.dim);

  frugal_op op{};
  op.struct_size = sizeof op;
  op.table = self.table_handle;
  op.pooling = self.pooling;
  op.keys = static_cast<const uint64_t*>(keys.const_data_ptr());
  op.count = static_cast<size_t>(keys.numel());
  if (ends.defined()) {
    op.offsets = static_cast<const uint64_t*>(ends.const_data_ptr());
    op.bags = static_cast<size_t>(ends.numel() - 1);
  }
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
  at::Tensor out = look_up(self, op, shape);
  if (!out.defined()) return not_usual();
  const std::shared_ptr<Backward> node(
      new Backward(torch::autograd::collect_next_edges(tensor_of(self.anchor)), &self, keys,
                   !keys.is_same(tensor_of(input)), ends),
      torch::autograd::deleteNode);
  torch::autograd::set_history(out, node);
  return THPVariable_Wrap(std::move(out));
}

// Forward(...)(module, input, offsets)
inline PyObject* forward_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(flags) != 3) return not_usual();
  return forward(*reinterpret_cast<Forward*>(self), arguments[0], arguments[1], arguments[2]);
  END_HANDLE_TH_ERRORS
}

inline PyObject* forward_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  unsigned long long lookup_call, begin_call, table, padding_key;
  long long dim;
  int pooling, bags, padded, shows_written;
  PyObject* objects[6];
  if (!PyArg_ParseTuple(arguments, "KKKLiKpppOOOOOO", &lookup_call, &begin_call, &table, &dim, &pooling,
                        &padding_key, &bags, &padded, &shows_written, &objects[0], &objects[1],
                        &objects[2], &objects[3], &objects[4], &objects[5]))
    return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  auto* self = reinterpret_cast<Forward*>(made);
  new (&self->ends) at::Tensor();
  self->vectorcall = forward_call;
  self->lookup_call = reinterpret_cast<decltype(&frugal_lookup)>(lookup_call);
  self->begin_call = reinterpret_cast<decltype(&frugal_step_begin)>(begin_call);
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
  forward_type.tp_doc = "Called with a module, input and offsets: its forward, or None.";
  forward_type.tp_basicsize = sizeof(Forward);
  forward_type.tp_flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  forward_type.tp_vectorcall_offset = offsetof(Forward, vectorcall);
  forward_type.tp_call = PyVectorcall_Call;
  forward_type.tp_new = forward_new;
  forward_type.tp_traverse = forward_traverse;
  forward_type.tp_dealloc = forward_dealloc;
  return PyType_Ready(&forward_type) == 0;
}

}  // namespace frugal_torch
