#include "train/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
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

// Tables for processing eight bytes at a time: table[k][b] is the CRC of byte b followed by k zero bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables make_tables() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, reflected
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

}  // namespace

uint32_t crc32c(uint32_t crc, const void* bytes, size_t count) {
  static const Tables tables = make_tables();
  const auto* at = static_cast<const unsigned char*>(bytes);
  crc = ~crc;
  for (; count >= 8; count -= 8, at += 8) {
    crc ^= static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
           static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
    crc = tables[7][crc & 0xff] ^ tables[6][crc >> 8 & 0xff] ^ tables[5][crc >> 16 & 0xff] ^
          tables[4][crc >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^
          tables[0][at[7]];
  }
  for (; count > 0; --count, ++at) crc = (crc >> 8) ^ tables[0][(crc ^ *at) & 0xff];
  return ~crc;
}

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

OutputFile::OutputFile(const std::string& path, bool append)
    : path_(path),
      descriptor_(
          ::open(
              path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666)) {
  if (descriptor_ < 0) fail(path_, "cannot be written");
}

OutputFile::~OutputFile() { ::close(descriptor_); }

void OutputFile::write(const void* bytes, size_t count) {
  crc_ = crc32c(crc_, bytes, count);
  bytes_ += static_cast<int64_t>(count);
  const auto* at = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = ::write(descriptor_, at, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot be written");
    at += written;
    count -= static_cast<size_t>(written);
  }
}

void OutputFile::sync() {
  if (::fsync(descriptor_) != 0) fail(path_, "cannot be written");
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

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error && fs::is_directory(path)) return;
  if (error) errno = error.value();
  fail(path, "cannot be created");
}

void replace_folder(const std::string& fresh, const std::string& path) {
  if (!fs::exists(path)) {
    if (::rename(fresh.c_str(), path.c_str()) != 0) fail(path, "cannot be written");
    return;
  }
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(fresh);  // now holds the old contents
    return;
  }
  delete_folder(path);  // this file system has no RENAME_EXCHANGE
  if (::rename(fresh.c_str(), path.c_str()) != 0) fail(path, "cannot be written");
}

void delete_folder(const std::string& path) {
  const fs::path place(path);
  const auto doomed = place.parent_path() / ("deleting-" + place.filename().string());
  fs::remove_all(doomed);
  if (::rename(path.c_str(), doomed.c_str()) != 0) fail(path, "cannot be deleted");
  fs::remove_all(doomed);
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail(folder, "cannot be read");
  const int failed = ::fsync(descriptor);
  ::close(descriptor);
  if (failed != 0) fail(folder, "cannot be synced");
}

FolderLock::FolderLock(const std::string& folder)
    : path_(fs::absolute(folder).string()),
      folder_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
      file_(::open((folder + kLockFile).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  bool busy = false, failed = folder_ < 0 || file_ < 0;
  // Network file systems cannot lock folders. There the file alone counts.
  if (!failed) busy = ::flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (!failed && !busy && ::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    busy = errno == EWOULDBLOCK;
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
