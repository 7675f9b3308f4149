// Preloaded into a program and the programs it starts: lets calls on files fail, to see what becomes of them.
//
// FAULT_PATH   only files and folders with this in their path count
// FAULT_KIND   which calls count, and what happens to the chosen one:
//              full   calls that need space: from the chosen one on, each fails with ENOSPC; deleting still works
//              broken all calls that change something: the chosen one fails with EIO
//              short  writes: the chosen one writes one byte instead of all
//              killed calls as for broken: the process is killed at the chosen one, a write being done by half
//              blind  calls that read: the chosen one fails with EIO
// FAULT_CALL   which call is chosen, from 1; 0: none
// FAULT_COUNT  a file of 8 zero bytes, shared by all processes, that holds the number of calls so far
// FAULT_LOG    a file that gets a line for each call: its number, its name and the path
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum Need { kSpace = 1, kChange = 2, kWrite = 4, kRead = 8 };

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL() return errno = error, -1

static __thread int error;  // of the call that was chosen; 0: write one byte

// Which calls count for this kind of fault.
static int counted(void) {
  const char* kind = getenv("FAULT_KIND");
  if (kind == NULL) return 0;
  error = strcmp(kind, "full") == 0 ? ENOSPC : strcmp(kind, "short") == 0 ? 0 : EIO;
  if (error == ENOSPC) return kSpace;
  if (error == 0) return kWrite;
  return strcmp(kind, "blind") == 0 ? kRead : kChange;
}

static long* shared_count(void) {
  static long* count = NULL;
  if (count != NULL) return count;
  const int file = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_COUNT"), O_RDWR | O_CLOEXEC);
  if (file < 0) abort();
  count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (count == MAP_FAILED) abort();
  return count;
}

static void note(long number, const char* name, const char* path) {
  char line[4400];
  const int length = snprintf(line, sizeof line, "%ld %s %s\n", number, name, path);
  const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
  const int log = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_LOG"), flags, 0666);
  if (log < 0 || syscall(SYS_write, log, line, (size_t)length) != length) abort();
  syscall(SYS_close, log);
}

static void die(void) {
  raise(SIGKILL);
  abort();
}

static int is_kill(void) { return strcmp(getenv("FAULT_KIND"), "killed") == 0; }

// Whether this call should fail. `needs` says what it does.
static int due(int needs, const char* name, const char* path) {
  const int before = errno;
  const int wanted = counted();
  if ((needs & wanted) == 0 || path == NULL || strstr(path, getenv("FAULT_PATH")) == NULL) return 0;
  const long number = __atomic_add_fetch(shared_count(), 1, __ATOMIC_SEQ_CST);
  const long chosen = atol(getenv("FAULT_CALL"));
  if (getenv("FAULT_LOG") != NULL) note(number, name, path);
  errno = before;
  const int fails = chosen > 0 && (wanted == kSpace ? number >= chosen : number == chosen);
  if (fails && is_kill() && (needs & kWrite) == 0) die();  // a write is done by half first
  return fails;
}

// The path of an open file and of a name in an open folder.
static const char* path_of(int descriptor, const char* name, char* path, size_t size) {
  if (name != NULL && (name[0] == '/' || descriptor == AT_FDCWD)) return name;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const int before = errno;
  const ssize_t length = readlink(link, path, size - 1);
  errno = before;
  if (length <= 0) return NULL;
  path[length] = '\0';
  if (name == NULL) return path;
  snprintf(path + length, size - (size_t)length, "/%s", name);
  return path;
}

static int due_at(int needs, const char* call, int descriptor, const char* name) {
  char path[4200];
  return due(needs, call, path_of(descriptor, name, path, sizeof path));
}

static int needs_of_open(int flags) {
  if ((flags & O_CREAT) != 0) return kSpace | kChange;
  return (flags & O_ACCMODE) == O_RDONLY ? kRead : kChange;
}

static int is_written(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

#define OPEN(name)                                                          \
  int name(const char* path, int flags, ...) {                              \
    va_list more;                                                           \
    va_start(more, flags);                                                  \
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;  \
    va_end(more);                                                           \
    if (!due(needs_of_open(flags), "open", path)) return REAL(name)(path, flags, mode); \
    FAIL();                                                                 \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
  int name(int folder, const char* path, int flags, ...) {                  \
    va_list more;                                                           \
    va_start(more, flags);                                                  \
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;  \
    va_end(more);                                                           \
    if (!due_at(needs_of_open(flags), "openat", folder, path)) {            \
      return REAL(name)(folder, path, flags, mode);                         \
    }                                                                       \
    FAIL();                                                                 \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                   \
  FILE* name(const char* path, const char* mode) {                                    \
    const int needs = strpbrk(mode, "wa+") != NULL ? kSpace | kChange : kRead;        \
    if (!due(needs, "fopen", path)) return REAL(name)(path, mode);                    \
    return errno = error, NULL;                                                       \
  }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void* bytes, size_t count) {
  if (!due_at(kSpace | kChange | kWrite, "write", fd, NULL)) return REAL(write)(fd, bytes, count);
  if (error == 0) return REAL(write)(fd, bytes, 1);
  if (is_kill() && REAL(write)(fd, bytes, count / 2) >= -1) die();
  FAIL();
}

#define PWRITE(name)                                                          \
  ssize_t name(int fd, const void* bytes, size_t count, off_t offset) {       \
    if (!due_at(kSpace | kChange | kWrite, "pwrite", fd, NULL)) {             \
      return REAL(name)(fd, bytes, count, offset);                            \
    }                                                                         \
    if (error == 0) return REAL(name)(fd, bytes, 1, offset);                  \
    if (is_kill() && REAL(name)(fd, bytes, count / 2, offset) >= -1) die();   \
    FAIL();                                                                   \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t read(int fd, void* bytes, size_t count) {
  if (!due_at(kRead, "read", fd, NULL)) return REAL(read)(fd, bytes, count);
  FAIL();
}

#define PREAD(name)                                                       \
  ssize_t name(int fd, void* bytes, size_t count, off_t offset) {         \
    if (!due_at(kRead, "pread", fd, NULL)) {                              \
      return REAL(name)(fd, bytes, count, offset);                        \
    }                                                                     \
    FAIL();                                                               \
  }
PREAD(pread)
PREAD(pread64)

int fsync(int fd) {
  if (!due_at(kSpace | kChange, "fsync", fd, NULL)) return REAL(fsync)(fd);
  FAIL();
}

int ftruncate(int fd, off_t length) {
  if (!due_at(kSpace | kChange, "ftruncate", fd, NULL)) return REAL(ftruncate)(fd, length);
  FAIL();
}

int fchmod(int fd, mode_t mode) {
  if (!due_at(kChange, "fchmod", fd, NULL)) return REAL(fchmod)(fd, mode);
  FAIL();
}

// It closes all the same, as on Linux.
int close(int fd) {
  const int fails = fd > 2 && is_written(fd) && due_at(kChange, "close", fd, NULL);
  const int reported = error;
  const int done = REAL(close)(fd);
  return fails ? (errno = reported, -1) : done;
}

int mkdir(const char* path, mode_t mode) {
  if (!due(kSpace | kChange, "mkdir", path)) return REAL(mkdir)(path, mode);
  FAIL();
}

char* mkdtemp(char* path) {
  if (!due(kSpace | kChange, "mkdtemp", path)) return REAL(mkdtemp)(path);
  return errno = error, NULL;
}

int rename(const char* from, const char* to) {
  if (!due(kSpace | kChange, "rename", from)) return REAL(rename)(from, to);
  FAIL();
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (!due_at(kSpace | kChange, "renameat2", from_folder, from)) {
    return REAL(renameat2)(from_folder, from, to_folder, to, flags);
  }
  FAIL();
}

#define DELETE(name)                                          \
  int name(const char* path) {                                \
    if (!due(kChange, #name, path)) return REAL(name)(path);  \
    FAIL();                                                   \
  }
DELETE(unlink)
DELETE(rmdir)
DELETE(remove)

int unlinkat(int folder, const char* path, int flags) {
  if (!due_at(kChange, "unlinkat", folder, path)) return REAL(unlinkat)(folder, path, flags);
  FAIL();
}

#define STAT(name, type)                                                          \
  int name(const char* path, struct type* status) {                               \
    if (!due(kRead, #name, path)) return REAL(name)(path, status);                \
    FAIL();                                                                       \
  }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

DIR* opendir(const char* path) {
  if (!due(kRead, "opendir", path)) return REAL(opendir)(path);
  return errno = error, NULL;
}

#define READDIR(name, type)                                                       \
  struct type* name(DIR* folder) {                                                \
    if (!due_at(kRead, "readdir", dirfd(folder), NULL)) return REAL(name)(folder); \
    return errno = error, NULL;                                                   \
  }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
