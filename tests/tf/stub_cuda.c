/* A libcuda.so.1 that writes down who calls it, and fails or works as the environment says. No GPU is behind it. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static void note(const char *call) {
  const char *path = getenv("STUB_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  if (file < 0) return;
  ssize_t written = write(file, call, strlen(call));
  written += write(file, "\n", 1);
  (void)written;
  close(file);
}

int cuInit(unsigned flags) {
  (void)flags;
  note("cuInit");
  while (number("STUB_HANGS", 0)) sleep(1);
  return number("STUB_CUINIT", 100);
}

int cuDriverGetVersion(int *version) {
  note("cuDriverGetVersion");
  *version = 13000;
  return 0;
}

int cuDeviceGetCount(int *count) {
  note("cuDeviceGetCount");
  *count = number("STUB_COUNT", 0);
  return 0;
}

int cuGetErrorName(int error, const char **text) {
  *text = error == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  *text = error == 100 ? "no CUDA-capable device is detected" : "unknown error";
  return 0;
}
