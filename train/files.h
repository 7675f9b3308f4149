#pragma once
// Safe file writing: after a crash or on a full disk, either the old or the new file is there, complete.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "gpt/files.h"

namespace train {

using gpt::crc32c;
using gpt::delete_folder;
using gpt::make_folder;
using gpt::names_in;
using gpt::OutputFile;
using gpt::replace_folder;
using gpt::sync_folder;

/// The CRC-32C of a whole file.
uint32_t crc32c_of_file(const std::string& path);

/// Replaces the file's contents atomically: writes a temporary file, syncs it and renames it. A symbolic link stays,
/// and the file it leads to is replaced. Devices, pipes and /dev/stdout are written to. A folder is an error.
void replace_file(const std::string& path, std::string_view text);

/// Throws if replace_file() would fail because of the path. Changes nothing.
void check_replaceable(const std::string& path);

/// The path without . and .. (where possible) and without a trailing slash.
std::string normal_path(const std::string& path);

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
