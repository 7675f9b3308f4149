// Preloaded into a program: lets one of its calls on a file fail, to see what the program makes of it.
// FAULT_PATH: only files and folders with this in their path count. FAULT_CALL: which call fails, from 1.
// FAULT_ERROR: the errno; 0: the call writes one byte instead of all. FAULT_HIT: a file to create when it does.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int error;

static int due(const char* path) {
  static int calls = 0;
  const char* wanted = getenv("FAULT_CALL");
  if (wanted == NULL || strstr(path, getenv("FAULT_PATH")) == NULL || ++calls != atoi(wanted)) return 0;
  close(open(getenv("FAULT_HIT"), O_WRONLY | O_CREAT, 0666));
  error = atoi(getenv("FAULT_ERROR"));
  return 1;
}

static int due_at(int descriptor) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  return readlink(link, path, sizeof path - 1) > 0 && due(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL() return errno = error, -1

ssize_t write(int fd, const void* bytes, size_t count) {
  if (!due_at(fd)) return REAL(write)(fd, bytes, count);
  if (error == 0) return REAL(write)(fd, bytes, 1);
  FAIL();
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  if (!due_at(fd)) return REAL(pwrite)(fd, bytes, count, offset);
  if (error == 0) return REAL(pwrite)(fd, bytes, 1, offset);
  FAIL();
}

int fsync(int fd) {
  if (!due_at(fd) || error == 0) return REAL(fsync)(fd);
  FAIL();
}

int close(int fd) {
  const int fails = fd > 2 && due_at(fd) && error != 0;
  const int done = REAL(close)(fd);
  if (!fails) return done;
  FAIL();
}

int rename(const char* from, const char* to) {
  if (!due(from) || error == 0) return REAL(rename)(from, to);
  FAIL();
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (!due(from) || error == 0) return REAL(renameat2)(from_folder, from, to_folder, to, flags);
  FAIL();
}
