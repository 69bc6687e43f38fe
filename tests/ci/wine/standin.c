// In the place of a native module on Windows: it links what the real one links of NVIDIA's, and asks it for its version. There is no
// Windows Python to compile against, so of its stable ABI it declares what it uses.
#include <stddef.h>

typedef struct _object PyObject;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);
typedef struct {
  const char* name;
  PyCFunction call;
  int flags;
  const char* doc;
} PyMethodDef;
typedef struct {
  struct {
    ptrdiff_t references;
    void* type;
    void *init, *index, *copy;
  } base;
  const char* name;
  const char* doc;
  ptrdiff_t size;
  PyMethodDef* methods;
  void *slots, *traverse, *clear, *free;
} PyModuleDef;
enum { METH_VARARGS = 1, METH_NOARGS = 4 };

__declspec(dllimport) PyObject* PyModule_Create2(PyModuleDef*, int);
__declspec(dllimport) PyObject* Py_BuildValue(const char*, ...);
__declspec(dllimport) size_t cudnnGetVersion(void);
__declspec(dllimport) size_t cublasLtGetVersion(void);

static PyObject* dotted(size_t version) {
  return Py_BuildValue("(nnn)", version / 10000, version % 10000 / 100, version % 100);
}

static PyObject* library_versions(PyObject* self, PyObject* none) {
  return Py_BuildValue("{sNsN}", "cudnn", dotted(cudnnGetVersion()), "cublaslt", dotted(cublasLtGetVersion()));
}

static PyObject* build_info(PyObject* self, PyObject* none) {
  return Py_BuildValue("{ss}", "device_code", DIGEST);
}

static PyObject* add_device_code(PyObject* self, PyObject* arguments) {
  return Py_BuildValue("");
}

static PyMethodDef methods[] = {
    {"library_versions", library_versions, METH_NOARGS, NULL},
    {"build_info", build_info, METH_NOARGS, NULL},
    {"add_device_code", add_device_code, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {{1}, "standin", NULL, -1, methods};

__declspec(dllexport) PyObject* INIT(void) {
  return PyModule_Create2(&module, 3);  // PYTHON_ABI_VERSION
}
