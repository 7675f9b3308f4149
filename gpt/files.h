#pragma once
// Files and folders that are whole or not there. Every error names the file and the reason.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// CRC-32C of `bytes`, continuing from `crc` of the bytes before; start with 0.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t count);

/// A file being read.
class InputFile {
 public:
  /// "-" is standard input. A folder is refused.
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  /// Size and time of the last change. A file that was written to differs in one of them.
  struct Stamp {
    int64_t bytes, seconds, nanoseconds;
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  bool is_regular() const { return regular_; }
  const std::string& path() const { return path_; }

  /// Reads up to `count` bytes; fewer only at the end of the file.
  size_t read(void* bytes, size_t count);
  /// The same from `offset` on, of a regular file.
  size_t read_at(int64_t offset, void* bytes, size_t count) const;

 private:
  std::string path_;
  int descriptor_;
  bool regular_ = false;
};

/// The whole file. Refuses one of more than `limit` bytes.
std::string read_whole(const std::string& path, size_t limit);

/// A file being written.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path, bool append = false);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* bytes, size_t count);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Writes over what is at `offset`. Not part of bytes() and crc().
  void write_at(int64_t offset, const void* bytes, size_t count);
  /// Flushes to disk. The data then survives a crash of the machine.
  void sync();
  /// Flushes to disk and closes. Nothing more can be written.
  void close();

  int64_t bytes() const { return bytes_; }
  uint32_t crc() const { return crc_; }

 private:
  std::string path_;
  int descriptor_;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;
};

/// The names in a folder, sorted. None if there is no such folder.
std::vector<std::string> names_in(const std::string& folder);

/// Creates a folder and its parents, if missing.
void make_folder(const std::string& path);

/// Replaces folder `path` with folder `fresh`, atomically if the file system supports it.
void replace_folder(const std::string& fresh, const std::string& path);

/// Deletes a folder by renaming it first, so a partial folder never appears under its name.
void delete_folder(const std::string& path);

/// Flushes renames within the folder to disk.
void sync_folder(const std::string& folder);

/// A folder in the making. It is a hidden sibling of its final place, .NAME.writing-XXXXXX, until commit(). If the process
/// dies before, the next StagedFolder for the same place deletes it.
class StagedFolder {
 public:
  /// Refuses if another process is writing the same folder.
  explicit StagedFolder(const std::string& path);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  /// Where to write until commit().
  const std::string& path() const { return fresh_; }
  /// Moves the folder to its place, which must be free, an empty folder, or with `replace` any folder. Its files must be
  /// synced.
  void commit(bool replace);

 private:
  void clean_up() const;
  bool make();

  std::string place_, parent_, prefix_, fresh_;
  int lock_ = -1;
};

}  // namespace gpt
