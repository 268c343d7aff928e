// A module of one table, and its calls of the library.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "frugal.h"
#include "python.h"

namespace frugal_torch {

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
  bool shows_written;  // the row of padding_key, once it was written
  PyObject *lookup, *table, *steps, *anchor;
  PyObject* places;  // Lookup.places[0]
  PyObject* first;   // the anchor's name among the module's parameters
  // Of the steps' _native.Trainer, which is another one after a move.
  PyObject *native, *turn;
  frugal_trainer* trainer;
  int64_t slice;  // milliseconds that a call may wait before Python handles signals
  // The offsets of the last call, with the last; those of the next may be the same.
  at::Tensor ends;
  int64_t length;  // of each bag, if keys were 2-D, or else -1
};

inline const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// Whether it is a tensor in the CPU's memory and nothing more: no wrapper, no view of another sign.
inline bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet usual =
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

// Whether nothing observes PyTorch's operations: no tracer, no mode of Python's, no transform.
// Autocast casts nothing of a lookup. Where a graph is recorded, it is one that can be kept.
inline bool is_usual_mode() {
  const bool inference = c10::InferenceMode::is_enabled();
  if (inference && c10::GradMode::is_enabled()) return false;
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  const auto excluded = tls.excluded_ - c10::default_excluded_set;
  return (tls.included_ - c10::default_included_set - c10::autocast_dispatch_keyset).empty() &&
         (inference ? excluded - c10::autograd_dispatch_keyset : excluded).empty() && !is_watched();
}

// Throws the error that Python has set.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Whether the library can take its memory, and a backward keep it that is to come.
inline bool is_usual(const at::Tensor& tensor, bool training) {
  return is_plain(tensor) && tensor.is_contiguous() && !(training && tensor.is_inference());
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
  // Python warns when the wait is long.
  return !PyErr_Occurred() && static_cast<bool>(call(steps, names.begin));
}

// When rows are read that are read now (Moment of _steps).
inline Ref moment_of(PyObject* steps) {
  const Ref next = get(steps, names.next), writes = get(steps, names.writes);
  return next && writes ? Ref(PyTuple_Pack(2, next.get(), writes.get())) : Ref();
}

// Rows. `training`: of the step, which begins, if it has not begun. Nothing, if that is not usual;
// an error of Python's may be set. `moment`, where it is wanted: becomes when they were read.
inline at::Tensor look_up(Forward& self, frugal_op& op, at::IntArrayRef shape, bool training,
                          Ref* moment) {
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
    if (moment) *moment = moment_of(self.steps);
    return moment && !*moment ? at::Tensor() : out;
  }
  // Python waits for longer, and warns.
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

// Whether offsets with the last are those of bags of so many keys. Others the library refuses,
// where it gets them.
inline bool are_ends(const at::Tensor& ends, int64_t count) {
  const auto* begin = ends.const_data_ptr<int64_t>();
  const auto* end = begin + ends.numel();
  return begin != end && *begin == 0 && *(end - 1) == count && std::is_sorted(begin, end);
}

}  // namespace frugal_torch
