#include "train/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
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

}  // namespace

uint32_t crc32c_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  std::vector<char> chunk(size_t{1} << 20);
  uint32_t crc = 0;
  while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())), file.gcount() > 0) {
    crc = crc32c(crc, chunk.data(), static_cast<size_t>(file.gcount()));
  }
  return crc;
}

void replace_file(const std::string& path, std::string_view text) {
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
  try {
    OutputFile file(temporary);
    file.write(text);
    file.sync();
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail(path, "cannot be written");
  const std::string folder = fs::path(path).parent_path().string();
  sync_folder(folder.empty() ? "." : folder);
}

std::string normal_path(const std::string& path) {
  const fs::path normal = fs::path(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).string();
}

FolderLock::FolderLock(const std::string& folder)
    // Locks a file, not the folder: on a network file system only file locks reach other machines.
    : descriptor_(::open((folder + kLockFile).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail(folder, "cannot be locked");
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  ::close(descriptor_);
  errno = error;
  if (error == EWOULDBLOCK) {
    throw FolderBusy("another process is training in '" + folder + "'");
  }
  fail(folder, "cannot be locked");
}

FolderLock::~FolderLock() { ::close(descriptor_); }

bool is_locked(const std::string& folder) {
  // Opened for reading, so that it works without write access to the run.
  const int descriptor = ::open((folder + kLockFile).c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool busy = ::flock(descriptor, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(descriptor);
  return busy;
}

std::shared_ptr<FolderLock> wait_for_lock(const std::string& folder, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    try {
      return std::make_shared<FolderLock>(folder);
    } catch (const FolderBusy&) {
      if (Clock::now() > end) return nullptr;
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
    }
  }
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace train
