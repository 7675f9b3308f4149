#include "train/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

namespace train {
namespace {

constexpr const char* kLockFile = "/lock";

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw std::runtime_error("'" + path + "' " + what + ": " + std::strerror(errno));
}

// Writes everything, however little the system takes at a time.
void write_all(int descriptor, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path, "cannot be written");
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// Whether the path is one of this process's open files, such as /proc/self/fd/1, which /dev/stdout leads to.
bool is_open_file(const fs::path& path) {
  std::error_code missing;
  const auto folder = fs::canonical(path.parent_path(), missing);
  return folder == "/proc/" + std::to_string(::getpid()) + "/fd";
}

// The path behind symbolic links. The last one may lead to a file that does not exist yet.
std::string followed(const std::string& path) {
  constexpr int kMostLinks = 40;  // as in Linux
  fs::path place = path;
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code error;
    if (!fs::is_symlink(fs::symlink_status(place, error)) || is_open_file(place)) {
      return place.string();
    }
    const fs::path target = fs::read_symlink(place, error);
    if (error) break;
    place = place.parent_path() / target;
  }
  errno = ELOOP;
  fail(path, "cannot be written");
}

// Whether the path, without links, is a regular file or nothing yet. Devices and pipes are not. A folder is an error.
bool is_replaceable(const std::string& path) {
  std::error_code error;
  const auto type = fs::symlink_status(path, error).type();
  if (type == fs::file_type::directory) {
    throw std::runtime_error("'" + path + "' is a folder, not a file");
  }
  return type == fs::file_type::regular || type == fs::file_type::not_found;
}

// Writes to a device, a pipe or an open file. An open file is shared, so that it goes on where others left off.
void write_directly(const std::string& path, std::string_view text) {
  const int descriptor =
      is_open_file(path)
          ? ::fcntl(std::stoi(fs::path(path).filename().string()), F_DUPFD_CLOEXEC, 0)
          : ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor < 0) fail(path, "cannot be written");
  try {
    write_all(descriptor, text, path);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  if (::close(descriptor) != 0) fail(path, "cannot be written");
}

// A lock on the whole file that belongs to the open file: the kernel drops it with the process, and it can be asked
// for without being taken.
struct flock whole_file(short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

// A new file beside `path`, since a rename stays within a file system. It is locked while its process lives; those that
// dead processes left are deleted.
class Temporary {
 public:
  explicit Temporary(const std::string& path)
      : path_(path), name_(path + "." + std::to_string(::getpid()) + kSuffix) {
    delete_leftovers();
    do {
      if (descriptor_ >= 0) ::close(descriptor_);  // another process took it for a dead one's
      descriptor_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
      if (descriptor_ < 0) fail(path_, "cannot be written");
      ::flock(descriptor_, LOCK_EX | LOCK_NB);
    } while (is_deleted());
  }
  ~Temporary() {
    if (!renamed_) ::unlink(name_.c_str());
    ::close(descriptor_);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  void become(std::string_view text) {
    write_all(descriptor_, text, path_);
    renamed_ = ::fsync(descriptor_) == 0 && ::rename(name_.c_str(), path_.c_str()) == 0;
    if (!renamed_) fail(path_, "cannot be written");
  }

 private:
  static constexpr const char* kSuffix = ".tmp";

  bool is_deleted() const {
    struct stat status = {};
    return ::fstat(descriptor_, &status) == 0 && status.st_nlink == 0;
  }

  void delete_leftovers() const {
    const fs::path place(path_);
    const std::string folder = place.has_parent_path() ? place.parent_path().string() : ".";
    const std::string prefix = place.filename().string() + ".";
    for (const auto& name : names_in(folder)) {
      if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) continue;
      const std::string_view suffix = kSuffix;
      const auto number = std::string_view(name).substr(prefix.size());
      if (number.find_first_not_of("0123456789") != number.size() - suffix.size()) continue;
      const std::string leftover = folder + "/" + name;
      const int descriptor = ::open(leftover.c_str(), O_RDONLY | O_CLOEXEC);
      if (descriptor < 0) continue;
      if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) ::unlink(leftover.c_str());
      ::close(descriptor);
    }
  }

  const std::string path_, name_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

}  // namespace

uint32_t crc32c_of_file(const std::string& path) {
  gpt::InputFile file(path);
  std::vector<char> chunk(size_t{1} << 20);
  uint32_t crc = 0;
  for (size_t got = chunk.size(); got == chunk.size();) {
    got = file.read(chunk.data(), chunk.size());
    crc = crc32c(crc, chunk.data(), got);
  }
  return crc;
}

void replace_file(const std::string& given, std::string_view text) {
  const std::string path = followed(given);
  if (!is_replaceable(path)) return write_directly(path, text);
  Temporary(path).become(text);
  const std::string folder = fs::path(path).parent_path().string();
  sync_folder(folder.empty() ? "." : folder);
}

void check_replaceable(const std::string& given) {
  const std::string path = followed(given);
  if (is_replaceable(path)) const Temporary tried(path);
}

std::string normal_path(const std::string& path) {
  const fs::path normal = fs::path(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).string();
}

FolderLock::FolderLock(const std::string& folder)
    : path_(fs::absolute(folder).string()),
      folder_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
      file_(::open((folder + kLockFile).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  bool busy = false, failed = folder_ < 0 || file_ < 0;
  // Network file systems cannot lock folders. There the file alone counts.
  if (!failed) busy = ::flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  auto lock = whole_file(F_WRLCK);
  if (!failed && !busy && ::fcntl(file_, F_OFD_SETLK, &lock) != 0) {
    busy = errno == EAGAIN || errno == EACCES;
    failed = !busy;
  }
  if (!failed && !busy) return;
  const int error = errno;
  for (const int descriptor : {folder_, file_}) {
    if (descriptor >= 0) ::close(descriptor);
  }
  if (busy) throw FolderBusy("another process is training in '" + folder + "'");
  errno = error;
  fail(folder, "cannot be locked");
}

FolderLock::~FolderLock() {
  ::close(file_);
  ::close(folder_);
}

void FolderLock::require_folder() const {
  struct stat ours = {}, there = {};
  if (::fstat(folder_, &ours) != 0) fail(path_, "cannot be read");
  if (::stat(path_.c_str(), &there) == 0) {
    if (there.st_dev == ours.st_dev && there.st_ino == ours.st_ino) return;
  } else if (errno != ENOENT && errno != ENOTDIR) {
    fail(path_, "cannot be read");
  }
  std::error_code unknown;
  const auto now = fs::read_symlink("/proc/self/fd/" + std::to_string(folder_), unknown).string();
  const bool moved = ours.st_nlink > 0 && !unknown;
  throw FolderGone(
      "'" + path_ + "' was " + (moved ? "moved to '" + now + "'" : std::string("deleted")) +
      " while a process was working in it");
}

bool is_locked(const std::string& folder) {
  // Opened for reading, so that it works without write access to the run.
  const int descriptor = ::open((folder + kLockFile).c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  auto lock = whole_file(F_RDLCK);
  const bool known = ::fcntl(descriptor, F_OFD_GETLK, &lock) == 0;
  ::close(descriptor);
  return known && lock.l_type != F_UNLCK;
}

std::shared_ptr<FolderLock> wait_for_lock(const std::string& folder, double seconds) {
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::duration<double, std::milli>;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  // Hundreds of processes may wait, also over a network: they ask less and less often, and not all at once.
  const double own_pace = 1.2 + 0.1 * (::getpid() % 8);
  for (Milliseconds pause(5);; pause = std::min(pause * own_pace, Milliseconds(250))) {
    try {
      return std::make_shared<FolderLock>(folder);
    } catch (const FolderBusy&) {
      if (Clock::now() > end) return nullptr;
      std::this_thread::sleep_for(pause);
    }
  }
}

std::string read_text(const std::string& path) { return gpt::read_whole(path, SIZE_MAX); }

}  // namespace train
