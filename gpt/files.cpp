#include "gpt/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

namespace gpt {
namespace {

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

// Opens for reading. With more shards than a process may open by default, the limit is raised as far as allowed.
int open_to_read(const std::string& path) {
  int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 && errno == EMFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (descriptor < 0) fail(path, "cannot be read");
  return descriptor;
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

InputFile::InputFile(const std::string& path)
    : path_(path == "-" ? "standard input" : path),
      descriptor_(path == "-" ? ::dup(STDIN_FILENO) : open_to_read(path)) {
  struct stat status{};
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0) fail(path_, "cannot be read");
  regular_ = S_ISREG(status.st_mode);
  if (S_ISDIR(status.st_mode)) {
    ::close(descriptor_);
    errno = EISDIR;
    fail(path_, "cannot be read");
  }
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      regular_(other.regular_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::Stamp InputFile::stamp() const {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) fail(path_, "cannot be read");
  return {status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

size_t InputFile::read(void* bytes, size_t count) {
  size_t done = 0;
  while (done < count) {
    const ssize_t got = ::read(descriptor_, static_cast<char*>(bytes) + done, count - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "cannot be read");
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

size_t InputFile::read_at(int64_t offset, void* bytes, size_t count) const {
  size_t done = 0;
  while (done < count) {
    const ssize_t got = ::pread(
        descriptor_, static_cast<char*>(bytes) + done, count - done,
        offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "cannot be read");
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

std::string read_whole(const std::string& path, size_t limit) {
  InputFile file(path);
  std::string text;
  constexpr size_t kPiece = size_t{1} << 16;
  for (size_t got = kPiece; got == kPiece;) {
    const size_t before = text.size();
    text.resize(before + kPiece);
    got = file.read(text.data() + before, kPiece);
    text.resize(before + got);
    if (text.size() > limit) {
      throw std::runtime_error(
          "'" + path + "' has more than " + std::to_string(limit >> 20) +
          " MiB, far more than expected; is it the right file?");
    }
  }
  return text;
}

OutputFile::OutputFile(const std::string& path, bool append)
    : path_(path),
      descriptor_(
          ::open(
              path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666)) {
  if (descriptor_ < 0) fail(path_, "cannot be written");
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

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

void OutputFile::write_at(int64_t offset, const void* bytes, size_t count) {
  const auto* at = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = ::pwrite(descriptor_, at, count, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot be written");
    at += written;
    offset += written;
    count -= static_cast<size_t>(written);
  }
}

void OutputFile::sync() {
  if (::fsync(descriptor_) != 0) fail(path_, "cannot be written");
}

void OutputFile::close() {
  sync();
  if (::close(std::exchange(descriptor_, -1)) != 0) fail(path_, "cannot be written");
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    errno = error.value();
    fail(folder, "cannot be read");
  }
  std::sort(names.begin(), names.end());
  return names;
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error && fs::is_directory(path)) return;
  if (error) errno = error.value();
  fail(path, "cannot be created");
}

void replace_folder(const std::string& fresh, const std::string& path) {
  if (::rename(fresh.c_str(), path.c_str()) == 0) return;  // the place was free, or an empty folder
  if (errno != ENOTEMPTY && errno != EEXIST) fail(path, "cannot be written");
  std::error_code ignored;
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(fresh, ignored);  // now holds the old contents
    return;
  }
  // This file system has no RENAME_EXCHANGE: for a moment there is no folder.
  const std::string old = fresh + ".old";
  if (::rename(path.c_str(), old.c_str()) != 0) fail(path, "cannot be replaced");
  if (::rename(fresh.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::rename(old.c_str(), path.c_str());
    errno = error;
    fail(path, "cannot be written");
  }
  fs::remove_all(old, ignored);
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

StagedFolder::StagedFolder(const std::string& path)
    : place_(path), parent_(fs::path(path).parent_path().string()), prefix_(".") {
  prefix_ += fs::path(path).filename().string();
  prefix_ += ".writing-";
  make_folder(parent_);
  clean_up();
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (make()) return;
  }
  errno = EBUSY;
  fail(place_, "cannot be written");
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!fresh_.empty()) fs::remove_all(fresh_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

// The lock of a living process tells its folder from a dead one's.
void StagedFolder::clean_up() const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent_, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.size() == prefix_.size() + 6 || name.ends_with(".old");
    if (!ours || !name.starts_with(prefix_)) continue;
    const int descriptor = ::open(entry.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) continue;  // gone meanwhile
    const bool alive = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    std::error_code ignored;
    if (!alive) fs::remove_all(entry.path(), ignored);
    ::close(descriptor);
    if (alive) {
      throw std::runtime_error(
          "another process is writing '" + place_ + "'; wait for it or choose another folder");
    }
  }
}

// Creates and locks the folder. False if another process took it for a dead one's in between.
bool StagedFolder::make() {
  std::string name = (fs::path(parent_) / (prefix_ + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) fail(place_, "cannot be written");
  const int descriptor = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  struct stat locked{}, there{};
  const bool busy = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (busy || ::fstat(descriptor, &locked) != 0 || ::stat(name.c_str(), &there) != 0 ||
      locked.st_ino != there.st_ino) {
    ::close(descriptor);
    return false;
  }
  fresh_ = name;
  lock_ = descriptor;
  const mode_t mask = ::umask(0);  // mkdtemp lets only the owner in
  ::umask(mask);
  if (::fchmod(descriptor, 0777 & ~mask) != 0) fail(place_, "cannot be written");
  return true;
}

void StagedFolder::commit(bool replace) {
  sync_folder(fresh_);
  if (replace) {
    replace_folder(fresh_, place_);
  } else if (::rename(fresh_.c_str(), place_.c_str()) != 0) {
    fail(place_, "cannot be written");
  }
  fresh_.clear();
  sync_folder(parent_);
}

}  // namespace gpt
