// What the files here share of Python.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace frugal_torch {

// A reference to an object of Python. To be made and dropped with the GIL.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref to(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* give() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Names of attributes and methods.
#define FRUGAL_NAMES(X)                                                                           \
  X(_cancelled) X(_dropped) X(_handle) X(_instead) X(_interrupted) X(_keeper) X(_lookup)          \
  X(_parameters) X(_shown) X(_slice) X(_take_grad) X(_turn) X(_untold) X(acquire) X(adding)       \
  X(anchor) X(aside) X(backward) X(backwards) X(begin) X(begun) X(by_step) X(change)              \
  X(clip_limit) X(common) X(counts) X(factor) X(features) X(found_inf) X(given) X(grad)           \
  X(grad_scale) X(group) X(groups) X(handle) X(held) X(hidden) X(hooks) X(include_last_offset)    \
  X(is_of) X(kind) X(lock) X(locked) X(look) X(lookup) X(made) X(max_norm) X(names) X(native)     \
  X(next) X(number) X(on_gpu) X(open) X(optimizer) X(param_groups) X(parts) X(plain) X(refused)   \
  X(refused_step) X(release) X(rounds) X(scale_grad_by_freq) X(seen) X(state) X(state_of)         \
  X(stateless) X(step) X(stepped) X(steps) X(table) X(tensors) X(unusual) X(version)              \
  X(weighted_rows) X(with_scale) X(world_size) X(writes) X(written)

struct Names {
#define FRUGAL_NAME(name) PyObject* name;
  FRUGAL_NAMES(FRUGAL_NAME)
#undef FRUGAL_NAME
};
inline Names names;

// Classes of frugal.torch, which it sets once.
struct Classes {
  PyObject* lock;            // of Steps: another one is a forked child's
  PyObject* held;            // _gradient.Held
  PyObject* part;            // _gradient.Part
  PyObject* gradient;        // _gradient.Gradient
  PyObject* lookup;          // _lookup.Lookup
  PyObject* count;           // _hook._Count
  PyObject* default_device;  // torch.utils._device.DeviceContext
};
inline Classes classes;

inline bool is(const Ref& object, PyObject* type) {
  return object && reinterpret_cast<PyObject*>(Py_TYPE(object.get())) == type;
}

// Operations of Python. An empty result means that Python has set an error.
inline Ref get(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }
inline Ref get(const Ref& object, PyObject* name) {
  return object ? get(object.get(), name) : Ref();
}

template <typename... Arguments>
Ref call(PyObject* object, PyObject* method, Arguments... arguments) {
  PyObject* all[] = {object, arguments...};
  return Ref(PyObject_VectorcallMethod(
      method, all, (1 + sizeof...(arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// An integer that is not negative, or -1.
inline int64_t integer(const Ref& object) {
  if (!object || !PyLong_Check(object.get())) return -1;
  return PyLong_AsLongLong(object.get());
}

// A handle of the library.
template <typename Handle>
Handle* handle_of(const Ref& object) {
  return object ? static_cast<Handle*>(PyLong_AsVoidPtr(object.get())) : nullptr;
}

// What a dict has, or nothing; borrowed.
inline PyObject* in(PyObject* dict, PyObject* name) {
  return PyDict_GetItemWithError(dict, name);
}

// The trainer's calls take turns in this way (_native.Trainer).
class Turn {
 public:
  explicit Turn(PyObject* list) : list_(list) {
    mine_ = PyList_CheckExact(list) && PyList_GET_SIZE(list) != 0 &&
            PyList_SetSlice(list, 0, 1, nullptr) == 0;
  }
  ~Turn() {
    if (mine_) PyList_Append(list_, Py_None);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool mine() const { return mine_; }

 private:
  PyObject* list_;
  bool mine_;
};

// The lock of a trainer's steps. An error that Python has set outlives its release.
class Locked {
 public:
  explicit Locked(PyObject* steps) : lock_(get(steps, names.lock)) {
    if (!is(lock_, classes.lock)) return;
    mine_ = static_cast<bool>(call(lock_.get(), names.acquire));
  }
  ~Locked() {
    if (!mine_) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    call(lock_.get(), names.release);
    PyErr_Restore(type, value, trace);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  bool mine() const { return mine_; }

 private:
  Ref lock_;
  bool mine_ = false;
};

// The result of a function that has done nothing, so that Python does the work: None, or the error
// that is set.
inline PyObject* not_usual() {
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace frugal_torch
