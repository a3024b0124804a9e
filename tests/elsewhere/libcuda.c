/* Stands for the CUDA driver where kernels are compiled and never run: it reports the compute capability that the
 * environment variable COMPILE_FOR names, such as 80 or 120, and accepts compiled kernels. */
#include <stdlib.h>

enum { SUCCESS = 0, MAJOR = 75, MINOR = 76, SHARED_MEMORY = 8, SHARED_MEMORY_OPT_IN = 97, MOST_SHARED_MEMORY = 227 * 1024 };

static int loaded; /* what handles point to */

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 0; return SUCCESS; }
int cuDeviceGet(int *device, int number) { *device = number; return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  const char *name = getenv("COMPILE_FOR");
  int capability = name ? atoi(name) : 0;
  switch (attribute) {
    case MAJOR: *value = capability / 10; break;
    case MINOR: *value = capability % 10; break;
    case SHARED_MEMORY:
    case SHARED_MEMORY_OPT_IN: *value = MOST_SHARED_MEMORY; break;
    default: *value = 0;
  }
  return SUCCESS;
}

int cuGetErrorName(int error, const char **name) { *name = "error of the stand-in"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "error of the stand-in"; return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { *module = &loaded; return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &loaded; return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return SUCCESS; }
