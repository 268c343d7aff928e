// The usual calls of frugal.torch, without Python between PyTorch and the library. Whatever is done
// here is done in Python as well, with the same calls of the library in the same order: what is not
// usual is left to Python with nothing done, and so is all where this is not there.

#include "anchor.h"
#include "forward.h"
#include "step.h"

namespace frugal_torch {
namespace {

// Changes with the interface between Python and this module: _usual.py loads no file of another
// number.
constexpr long kRevision = 12;

// `tell(lock, Held, Part, Gradient, Lookup, _Count, DeviceContext)` sets `classes`.
PyObject* tell(PyObject*, PyObject* arguments) {
  Classes told;
  if (!PyArg_ParseTuple(arguments, "OOOOOOO", &told.lock, &told.held, &told.part, &told.gradient,
                        &told.lookup, &told.count, &told.default_device))
    return nullptr;
  for (PyObject* each : {told.lock, told.held, told.part, told.gradient, told.lookup, told.count,
                         told.default_device})
    Py_INCREF(each);
  classes = told;
  Py_RETURN_NONE;
}

// step(begin, push, end, optimizer, known): addresses of the library's calls; see step_tables.
PyObject* step(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5) return not_usual();
  const StepCalls calls{
      reinterpret_cast<decltype(&frugal_step_begin)>(PyLong_AsVoidPtr(arguments[0])),
      reinterpret_cast<decltype(&frugal_push_grad)>(PyLong_AsVoidPtr(arguments[1])),
      reinterpret_cast<decltype(&frugal_step_end)>(PyLong_AsVoidPtr(arguments[2]))};
  return step_tables(calls, arguments[3], arguments[4]);
  END_HANDLE_TH_ERRORS
}

// show(known): True, or None and Python is to do it.
PyObject* give_back(PyObject*, PyObject* known) {
  HANDLE_TH_ERRORS
  return show(known);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"show", give_back, METH_O, "Gives the tables' gradients back after a step."},
    {"tell", tell, METH_VARARGS, "Sets the classes whose objects have a usual path."},
    {"step", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(step)), METH_FASTCALL,
     "The step of the tables that an optimizer has: True, or None and nothing is done."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_direct", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace frugal_torch

PyMODINIT_FUNC PyInit__direct() {
  using namespace frugal_torch;
#define FRUGAL_INTERN(name) \
  if (!(names.name = PyUnicode_InternFromString(#name))) return nullptr;
  FRUGAL_NAMES(FRUGAL_INTERN)
  HANDLE_TH_ERRORS
  count_references();
  if (!make_forward_type() || !make_grad_type()) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (!made || PyModule_AddIntConstant(made, "REVISION", kRevision) ||
      PyModule_AddObjectRef(made, "Forward", reinterpret_cast<PyObject*>(&forward_type)) ||
      PyModule_AddObjectRef(made, "Grad", reinterpret_cast<PyObject*>(&grad_type))) {
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
  END_HANDLE_TH_ERRORS
}
