#pragma once
// Safe file writing: after a crash or on a full disk, either the old or the new file is there, complete.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace train {

/// CRC-32C of `bytes`, continuing from `crc` of the bytes before; start with 0.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t count);

/// The CRC-32C of a whole file.
uint32_t crc32c_of_file(const std::string& path);

/// A file being written. Errors, including a full disk, name the file.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path, bool append = false);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* bytes, size_t count);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Flushes to disk. The data then survives a crash of the machine.
  void sync();

  int64_t bytes() const { return bytes_; }
  uint32_t crc() const { return crc_; }

 private:
  std::string path_;
  int descriptor_;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;
};

/// Replaces the file's contents atomically: writes a temporary file, syncs it and renames it. A symbolic link stays,
/// and the file it leads to is replaced. Devices, pipes and /dev/stdout are written to. A folder is an error.
void replace_file(const std::string& path, std::string_view text);

/// Throws if replace_file() would fail because of the path. Changes nothing.
void check_replaceable(const std::string& path);

/// The path without . and .. (where possible) and without a trailing slash.
std::string normal_path(const std::string& path);

/// Creates a folder and its parents, if missing.
void make_folder(const std::string& path);

/// Replaces folder `path` with folder `fresh`, atomically if the file system supports it.
void replace_folder(const std::string& fresh, const std::string& path);

/// Deletes a folder by renaming it first, so a partial folder never appears under its name.
void delete_folder(const std::string& path);

/// Flushes renames within the folder to disk.
void sync_folder(const std::string& folder);

/// Thrown if another process has locked the folder.
struct FolderBusy : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Thrown if a locked folder is no longer where it was.
struct FolderGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Keeps other processes out of a folder until destroyed or the process ends. Locks the folder itself, which works
/// even if somebody deletes the file "lock" in it, and that file, which also works across a network.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// Throws FolderGone if the folder was deleted, moved or replaced since.
  void require_folder() const;

 private:
  std::string path_;
  int folder_, file_;
};

/// Whether a process has locked the folder; false if the lock file cannot be read. The check takes no lock itself.
bool is_locked(const std::string& folder);

/// Waits for the lock. Returns null if it is not free within `seconds`.
std::shared_ptr<FolderLock> wait_for_lock(const std::string& folder, double seconds);

std::string read_text(const std::string& path);

}  // namespace train
