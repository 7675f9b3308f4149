#pragma once
// Writing files so that a crash or a full disk leaves either the old or the new one, whole.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace train {

/// CRC-32C of `bytes` after those that gave `crc`; 0 to begin with.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t count);

/// The CRC-32C of a whole file.
uint32_t crc32c_of_file(const std::string& path);

/// A file being written. What goes wrong, a full disk too, is an error that names the file.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path, bool append = false);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* bytes, size_t count);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// To the disk itself; after this a crash of the machine does not lose it.
  void sync();

  int64_t bytes() const { return bytes_; }
  uint32_t crc() const { return crc_; }

 private:
  std::string path_;
  int descriptor_;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;
};

/// Puts `text` in the file's place: written beside it, synced, renamed.
void replace_file(const std::string& path, std::string_view text);

/// Without . and .. where that is possible, and without a slash at the end.
std::string normal_path(const std::string& path);

/// Makes a folder and those above it; no harm if it is there.
void make_folder(const std::string& path);

/// Puts folder `fresh` in the place of folder `path`, in one step where the file system can.
void replace_folder(const std::string& fresh, const std::string& path);

/// Deletes a folder so that no part of it is ever seen under its name.
void delete_folder(const std::string& path);

/// Makes renames within the folder last.
void sync_folder(const std::string& folder);

/// Another process has the folder.
struct FolderBusy : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Keeps other processes out of a folder as long as it lives, or the process does, by a lock on its file "lock".
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
};

/// Whether a process has the folder, as far as one may look. To find out keeps others out for a moment if it is free.
bool is_locked(const std::string& folder);

/// The lock as soon as it is free, or null if it is not within `seconds`.
std::shared_ptr<FolderLock> wait_for_lock(const std::string& folder, double seconds);

std::string read_text(const std::string& path);

}  // namespace train
