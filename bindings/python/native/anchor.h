// The `grad` of an anchor, which optimizers ask for and take away in each step.
#pragma once

#include "forward.h"

namespace frugal_torch {

// Does what Anchor._take_grad does with None, if no backward has failed.
inline PyObject* drop_grad(PyObject* anchor) {
  const Ref given = get(anchor, names.given), begun = get(anchor, names.begun);
  if (!given || !begun) return nullptr;
  if (PyObject_Size(given.get()) != 0) return call(anchor, names._take_grad, Py_None).give();
  tensor_of(anchor).mutable_grad().reset();
  if (PyObject_SetAttr(anchor, names.aside, Py_None)) return nullptr;
  if (begun.get() == Py_None) Py_RETURN_NONE;
  // It is used again if only the anchor and this function refer to it.
  const bool alone = Py_REFCNT(begun.get()) == 2 && tensor_of(begun.get()).use_count() == 1;
  if (!alone) return PyObject_SetAttr(anchor, names.begun, Py_None) ? nullptr : Py_NewRef(Py_None);
  const Ref parts(PyList_New(0)), limit(PyFloat_FromDouble(0.0));
  if (!parts || !limit || PyObject_SetAttr(begun.get(), names.parts, parts.get()) ||
      PyObject_SetAttr(begun.get(), names.clip_limit, limit.get()))
    return nullptr;
  Py_RETURN_NONE;
}

inline PyObject* grad_get(PyObject* self, PyObject* anchor, PyObject*) {
  if (!anchor || anchor == Py_None) return Py_NewRef(self);
  HANDLE_TH_ERRORS
  Ref grad(THPVariable_Wrap(tensor_of(anchor).grad()));
  if (grad.get() == Py_None || is(grad, classes.gradient)) return grad.give();
  return call(anchor, names._shown, grad.get()).give();  // a reducer's; else an error
  END_HANDLE_TH_ERRORS
}

inline int grad_set(PyObject*, PyObject* anchor, PyObject* value) {
  HANDLE_TH_ERRORS
  const Ref done(value && value != Py_None
                     ? call(anchor, names._take_grad, value).give()
                     : drop_grad(anchor));
  return done ? 0 : -1;
  END_HANDLE_TH_ERRORS_RET(-1)
}

struct Grad {
  PyObject_HEAD
};
inline PyTypeObject grad_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline bool make_grad_type() {
  grad_type.tp_name = "frugal.torch.Grad";
  grad_type.tp_doc = "The property Anchor.grad.";
  grad_type.tp_basicsize = sizeof(Grad);
  grad_type.tp_flags = Py_TPFLAGS_DEFAULT;
  grad_type.tp_new = PyType_GenericNew;
  grad_type.tp_descr_get = grad_get;
  grad_type.tp_descr_set = grad_set;
  return PyType_Ready(&grad_type) == 0;
}

}  // namespace frugal_torch
