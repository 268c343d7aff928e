// A module's forward.
#pragma once

#include <new>

#include "backward.h"
#include "weights.h"

namespace frugal_torch {

// Whether an attribute of a module is None or False. `absent`: what it is, if it is not its own.
inline bool is_off(PyObject* dict, PyObject* name, bool absent) {
  PyObject* found = in(dict, name);
  return found ? found == Py_None || found == Py_False : absent;
}

inline bool is_tensor(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass;
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
  const bool weighs = graph && weights.defined() && weights.requires_grad();
  Ref moment;
  at::Tensor out = look_up(self, op, shape, training, weighs ? &moment : nullptr);
  if (!out.defined()) return not_usual();
  if (training) {
    const std::shared_ptr<Backward> node(
        new Backward(torch::autograd::collect_next_edges(tensor_of(self.anchor)), &self, keys,
                     !keys.is_same(tensor_of(input)), pooled, weights),
        torch::autograd::deleteNode);
    torch::autograd::set_history(out, node);
  }
  if (maximum) out = largest(self, keys, ends, out);
  if (weighs) {
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
