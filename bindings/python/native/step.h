// The step of an optimizer of torch's, for the tables that it has: _hook._step in the usual case.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "forward.h"

namespace frugal_torch {

struct StepCalls {
  decltype(&frugal_step_begin) begin;
  decltype(&frugal_push_grad) push;
  decltype(&frugal_step_end) end;
};

// A table of the optimizer that has a gradient.
struct Stepped {
  Ref anchor, table, gradient, optimizer;
  Ref state, count;  // where steps are counted
  bool changed;  // the optimizer
};

struct Push {
  int64_t number;  // of the backward
  frugal_op op;
};

// What one step is made of.
struct Step {
  std::vector<Stepped> tables;
  std::vector<Push> pushes;
  std::vector<at::Tensor> alive;  // what the ops point into
  std::vector<Ref> kept;
  Ref steps;
};

// The ops of a backward's gradient, if it can be pushed as it is.
inline bool add_pushes(Step& step, PyObject* part) {
  const Ref held = get(part, names.held), lookup = get(held, names.lookup);
  if (!is(lookup, classes.lookup)) return false;
  Ref tensors = get(held, names.tensors), features = get(lookup, names.features),
      mine = get(part, names.features);
  const Ref given = get(held, names.grad);
  if (!tensors || !features || !mine || !given || !PyTuple_Check(mine.get()) ||
      !PyTuple_Check(features.get()) || !PySequence_Check(tensors.get()) ||
      !THPVariable_Check(given.get()))
    return false;
  const at::Tensor& grad = tensor_of(given.get());
  if (!is_plain(grad) || grad.scalar_type() != at::kFloat || grad.dim() != 2 ||
      integer(get(held, names.version)) != static_cast<int64_t>(grad._version()))
    return false;
  const int64_t number = integer(get(held, names.number));
  const int64_t stride = grad.size(0) > 1 ? grad.stride(0) : grad.size(1);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mine.get()); ++i) {
    const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GET_ITEM(mine.get(), i));
    if (at < 0 || at >= PyTuple_GET_SIZE(features.get())) return false;
    PyObject* feature = PyTuple_GET_ITEM(features.get(), at);  // a Feature
    if (!PyTuple_Check(feature) || PyTuple_GET_SIZE(feature) != 4) return false;
    PyObject* padding = PyTuple_GET_ITEM(feature, 2);
    Push push{number, {}};
    frugal_op& op = push.op;
    op.struct_size = sizeof op;
    op.table = handle_of<frugal_table>(get(PyTuple_GET_ITEM(feature, 0), names.handle));
    op.pooling = static_cast<int32_t>(PyLong_AsLong(PyTuple_GET_ITEM(feature, 1)));
    if (padding != Py_None) {
      op.padding_key = PyLong_AsUnsignedLongLong(padding);
      op.flags = FRUGAL_OP_PADDING;
    }
    const int64_t column = PyLong_AsLongLong(PyTuple_GET_ITEM(feature, 3));
    op.grads = grad.const_data_ptr<float>() + column;
    op.row_stride = sizeof(float) * static_cast<size_t>(stride);
    for (int which = 0; which < 3; ++which) {
      const Ref object(PySequence_GetItem(tensors.get(), 3 * at + which));
      if (!object) return false;
      if (object.get() == Py_None) continue;
      if (!THPVariable_Check(object.get())) return false;
      const at::Tensor& tensor = tensor_of(object.get());
      if (!is_plain(tensor)) return false;
      const void* data = tensor.const_data_ptr();
      if (which == 0) {
        op.keys = static_cast<const uint64_t*>(data);
        op.count = static_cast<size_t>(tensor.numel());
      } else if (which == 1) {
        op.offsets = static_cast<const uint64_t*>(data);
        op.bags = static_cast<size_t>(tensor.numel() - 1);
      } else {
        op.weights = static_cast<const float*>(data);
      }
      step.alive.push_back(tensor);
    }
    step.pushes.push_back(push);
  }
  step.alive.push_back(grad);
  return !PyErr_Occurred();
}

// Whether a group's values are those that its optimizers of the engine were made of (_Group.look).
inline bool is_as_seen(PyObject* own, PyObject* group, PyObject* kind) {
  const Ref seen = get(own, names.seen), known = get(own, names.names),
      made = get(own, names.made), before = get(own, names.group);
  if (!seen || !known || !made || made.get() == Py_None || before.get() != group) return false;
  if (get(made, names.kind).get() != kind || !PyTuple_Check(seen.get()) ||
      !PyTuple_Check(known.get()))
    return false;
  const Py_ssize_t count = PyDict_Size(group);
  if (PyTuple_GET_SIZE(seen.get()) != count || PyTuple_GET_SIZE(known.get()) != count) return false;
  PyObject *name, *value;
  for (Py_ssize_t place = 0, i = 0; PyDict_Next(group, &place, &name, &value); ++i)
    if (name != PyTuple_GET_ITEM(known.get(), i) || value != PyTuple_GET_ITEM(seen.get(), i))
      return false;
  return true;
}

// The engine's optimizer of a table's next step (_Group.optimizer, _Group.with_scale).
inline Ref optimizer_of(PyObject* own, const Ref& table, int64_t count, const Ref& gradient,
                        bool scaled) {
  const Ref made = get(own, names.made), by_step = get(made, names.by_step),
            common = get(table, names.common);
  if (!by_step || !common) return {};
  const Ref number(PyLong_FromLongLong(count));
  Ref found;
  if (by_step.get() == Py_False) {
    const Ref one(PyLong_FromLong(1)), key(PyTuple_Pack(2, one.get(), common.get())),
        plain = get(made, names.plain);
    if (!key || !plain || !PyDict_Check(plain.get())) return {};
    found = Ref::to(PyDict_GetItemWithError(plain.get(), key.get()));
  }
  if (!found && !PyErr_Occurred()) found = call(own, names.optimizer, number.get(), common.get());
  if (!found || !scaled) return found;
  return call(own, names.with_scale, found.get(), gradient.get());
}

// Checks what the optimizer's state has of a table, and counts. False if something of it is not in
// the table.
inline bool take_state(Stepped& one, const Ref& made, PyObject* states, int64_t& next) {
  const Ref counts = get(made, names.counts), stateless = get(made, names.stateless);
  if (!counts || !stateless) return false;
  PyObject* state = PyDict_GetItemWithError(states, one.anchor.get());
  if (!state ? PyErr_Occurred() != nullptr : !PyDict_Check(state)) return false;
  if (stateless.get() == Py_True) return !state || PyDict_Size(state) == 0;
  const Ref holder = get(one.table, names.state_of);  // a weak reference
  if (!state || !holder || holder.get() == Py_None ||
      Ref(PyObject_CallNoArgs(holder.get())).get() != state)
    return false;
  if (counts.get() != Py_True) return PyDict_Size(state) == 0;
  const Ref count = Ref::to(in(state, names.step));
  if (PyDict_Size(state) != 1 || !is(count, classes.count)) return false;
  next = integer(count) + 1;
  const Ref number(PyLong_FromLongLong(next));
  one.state = Ref::to(state);
  one.count = Ref(PyObject_CallOneArg(classes.count, number.get()));
  return static_cast<bool>(one.count);
}

// Takes a table's part in, or returns false. `skip`: there is none, as it has no gradient.
inline bool take(Step& step, PyObject* entry, PyObject* groups, PyObject* states, PyObject* kind,
                 PyObject* param_groups, bool& skip) {
  Stepped one;
  one.anchor = get(entry, names.anchor);
  one.table = get(entry, names.table);
  const Ref at = get(entry, names.group), keeper = get(one.table, names._keeper),
            stepped = get(one.table, names.stepped), steps = get(one.table, names.steps);
  if (!one.anchor || !at || keeper.get() != Py_None || stepped.get() != Py_True || !steps)
    return false;
  const at::Tensor& anchor = tensor_of(one.anchor.get());
  if (integer(get(one.anchor, names.seen)) != static_cast<int64_t>(anchor._version())) return false;
  if (integer(get(steps, names.world_size)) != 1) return false;
  skip = !anchor.grad().defined();
  if (skip) return true;
  if (step.steps.get() != steps.get()) return false;

  one.gradient = Ref(THPVariable_Wrap(anchor.grad()));
  if (!is(one.gradient, classes.gradient)) return false;
  Ref parts = get(one.gradient, names.parts);
  const Ref limit = get(one.gradient, names.clip_limit);
  if (!parts || !limit || !PyList_CheckExact(parts.get()) || PyList_GET_SIZE(parts.get()) == 0)
    return false;
  double common = 1.0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts.get()); ++i) {
    const Ref part = Ref::to(PyList_GET_ITEM(parts.get(), i)), factor = get(part, names.factor);
    if (!factor) return false;
    const double now = PyFloat_AsDouble(factor.get());
    if (i != 0 && now != common) return false;
    common = now;
    if (!std::isfinite(now) || !add_pushes(step, part.get())) return false;
  }

  const Py_ssize_t place = PyLong_AsSsize_t(at.get());
  if (place < 0 || place >= PyList_GET_SIZE(groups) || place >= PyList_GET_SIZE(param_groups))
    return false;
  PyObject *own = PyList_GET_ITEM(groups, place), *group = PyList_GET_ITEM(param_groups, place);
  if (!PyDict_Check(group)) return false;
  if (!is_as_seen(own, group, kind) && !call(own, names.look, kind, group)) return false;
  int64_t next = 1;
  if (!take_state(one, get(own, names.made), states, next)) return false;
  const bool scaled = common != 1.0 || PyFloat_AsDouble(limit.get()) != 0.0;
  one.optimizer = optimizer_of(own, one.table, next, one.gradient, scaled);
  if (!one.optimizer) return false;  // also an exception, which a call from here would lose
  const Ref before = get(one.table, names.optimizer);
  if (!before) return false;
  one.changed = one.optimizer.get() != before.get();
  if (one.changed && call(one.table.get(), names.is_of, one.optimizer.get()).get() != Py_True)
    return false;
  step.kept.push_back(std::move(parts));
  step.tables.push_back(std::move(one));
  return true;
}

// Makes the engine's step (Steps.apply), under the lock. False: not made, and an error may be set.
inline bool apply(const StepCalls& calls, Step& step) {
  PyObject* steps = step.steps.get();
  const Ref open = get(steps, names.open), native = get(steps, names.native),
            untold = get(steps, names._untold), on_gpu = get(native, names.on_gpu),
            list = get(native, names._turn), handle = get(native, names._handle),
            slice = get(native, names._slice);
  if (!open || !list || !handle || !slice || untold.get() != Py_None || on_gpu.get() != Py_False)
    return false;
  auto* trainer = handle_of<frugal_trainer>(handle);
  if (open.get() != Py_True && !begin(steps, list.get(), calls.begin, trainer, integer(slice)))
    return false;
  const Ref next = get(steps, names.next);
  if (!next) return false;
  for (const Stepped& one : step.tables)
    if (one.changed && !call(one.table.get(), names.change, one.optimizer.get(), next.get()))
      return false;

  std::stable_sort(step.pushes.begin(), step.pushes.end(),
                   [](const Push& a, const Push& b) { return a.number < b.number; });
  std::vector<frugal_op> ops;
  ops.reserve(step.pushes.size());
  for (const Push& push : step.pushes) ops.push_back(push.op);
  const int64_t number = integer(next);
  int32_t status;
  {
    const Turn turn(list.get());
    if (!turn.mine()) return false;
    const pybind11::gil_scoped_release others;
    status = calls.push(trainer, ops.data(), ops.size());
    if (status == FRUGAL_OK) status = calls.end(trainer, static_cast<uint64_t>(number), 0);
  }
  if (status != FRUGAL_OK) {
    const Ref refused(PyLong_FromLong(status));
    call(steps, names.refused_step, refused.get());  // which raises
    return false;
  }
  const Ref after(PyLong_FromLongLong(number + 1));
  return after && PyObject_SetAttr(steps, names.open, Py_False) == 0 &&
         PyObject_SetAttr(steps, names.next, after.get()) == 0;
}

// Hides the anchors' gradients from the optimizer. The interpreter's lock is held throughout, so
// that no backward of another thread adds to one meanwhile; in Python the anchor's `adding` does
// that.
inline bool hide(PyObject* known, PyObject* entries) {
  const Ref hidden(PyList_New(0));  // from the beginning `known` has it: an error loses no gradient
  if (!hidden || PyObject_SetAttr(known, names.hidden, hidden.get())) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); ++i) {
    const Ref anchor = get(PyList_GET_ITEM(entries, i), names.anchor);
    if (!anchor) return false;
    at::Tensor& grad = tensor_of(anchor.get()).mutable_grad();
    if (!grad.defined()) continue;
    const Ref gradient(THPVariable_Wrap(grad)), pair(PyTuple_Pack(2, anchor.get(), gradient.get()));
    if (!pair || PyList_Append(hidden.get(), pair.get()) ||
        PyObject_SetAttr(anchor.get(), names.aside, gradient.get()))
      return false;
    grad.reset();
  }
  return true;
}

// Gives the gradients back that were hidden (_hook._show), and holds the interpreter's lock, too.
// Not while a backward in Python adds to one: it has already read where the gradient is.
inline PyObject* show(PyObject* known) {
  const Ref hidden = get(known, names.hidden);
  if (!hidden || !PyList_CheckExact(hidden.get())) return not_usual();
  const Py_ssize_t count = PyList_GET_SIZE(hidden.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* pair = PyList_GET_ITEM(hidden.get(), i);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return not_usual();
    const Ref adding = get(PyTuple_GET_ITEM(pair, 0), names.adding);
    if (!adding || call(adding.get(), names.locked).get() != Py_False) return not_usual();
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* pair = PyList_GET_ITEM(hidden.get(), i);
    PyObject* anchor = PyTuple_GET_ITEM(pair, 0);
    at::Tensor& grad = tensor_of(anchor).mutable_grad();
    if (!grad.defined()) grad = tensor_of(PyTuple_GET_ITEM(pair, 1));
    if (PyObject_SetAttr(anchor, names.aside, Py_None)) return nullptr;
  }
  const Ref none(PyList_New(0));
  if (!none || PyObject_SetAttr(known, names.hidden, none.get())) return nullptr;
  return Py_NewRef(Py_True);
}

// An attribute that the optimizer has, as a rule, or its class; nothing: it is None or not there.
inline bool has(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
  if (PyObject_GetOptionalAttr(object, name, &found) < 0) return true;
  const Ref owned(found);
  return found && found != Py_None;
}

// step(optimizer, known): True, or None and nothing is done.
inline PyObject* step_tables(const StepCalls& calls, PyObject* optimizer, PyObject* known) {
  const Ref rounds = get(known, names.rounds), groups = get(known, names.groups),
            states = get(optimizer, names.state), param_groups = get(optimizer, names.param_groups);
  if (!rounds || !groups || !states || !param_groups || !PyList_CheckExact(rounds.get()) ||
      PyList_GET_SIZE(rounds.get()) != 1 || !PyList_CheckExact(groups.get()) ||
      !PyDict_Check(states.get()) || !PyList_Check(param_groups.get()) ||
      has(optimizer, names.found_inf) || has(optimizer, names.grad_scale))
    return not_usual();
  PyObject* entries = PyList_GET_ITEM(rounds.get(), 0);
  if (!PyList_CheckExact(entries)) return not_usual();
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(optimizer));
  if (PyList_GET_SIZE(entries) == 0) return not_usual();
  Step step;
  step.steps = get(get(PyList_GET_ITEM(entries, 0), names.table), names.steps);
  if (!step.steps) return nullptr;
  // Until all is done: what a backward in another thread delivers is for the next step.
  const Locked locked(step.steps.get());
  if (!locked.mine()) return not_usual();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); ++i) {
    bool skip = false;
    const Ref entry = Ref::to(PyList_GET_ITEM(entries, i));
    if (!take(step, entry.get(), groups.get(), states.get(), kind, param_groups.get(), skip))
      return not_usual();
  }
  if (!step.tables.empty()) {
    if (!apply(calls, step)) return not_usual();
    for (const Stepped& one : step.tables)
      if (one.count && PyDict_SetItem(one.state.get(), names.step, one.count.get()))
        return nullptr;
  }
  return hide(known, entries) ? Py_NewRef(Py_True) : nullptr;
}

}  // namespace frugal_torch
