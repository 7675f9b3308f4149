// Replacing files: links, devices, folders, failures. Locks: many processes at once.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "testing.h"
#include "train/files.h"

namespace train {
namespace {

namespace fs = std::filesystem;

std::string why(const std::string& path) {
  return error_of<std::exception>([&] { replace_file(path, "new"); });
}

size_t files_in(const std::string& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), {}));
}

TEST(NamesTest, AFolderThatCannotBeReadIsNotAnEmptyOne) {
  const TemporaryFolder folder;
  replace_file(folder / "b", "");
  replace_file(folder / "a", "");
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(names_in(folder / "missing").empty());
  const auto why = error_of<std::exception>([&] { names_in(folder / "a"); });
  EXPECT_NE(why.find("a' cannot be read: Not a directory"), std::string::npos) << why;
}

TEST(ReplaceFileTest, LinksStayAndTheirTargetsAreReplaced) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "elsewhere");
  replace_file(folder / "elsewhere/file", "old");
  fs::create_symlink("elsewhere/file", folder / "link");
  fs::create_symlink("link", folder / "chain");
  fs::create_symlink("elsewhere/fresh", folder / "dangling");
  replace_file(folder / "chain", "new");
  replace_file(folder / "dangling", "made");
  for (const char* link : {"link", "chain", "dangling"}) EXPECT_TRUE(fs::is_symlink(folder / link));
  EXPECT_EQ(read_text(folder / "elsewhere/file"), "new");
  EXPECT_EQ(read_text(folder / "elsewhere/fresh"), "made");
  EXPECT_EQ(files_in(folder / "elsewhere"), 2);
  fs::create_symlink("loop", folder / "loop");
  EXPECT_NE(why(folder / "loop").find("cannot be written"), std::string::npos);
}

TEST(ReplaceFileTest, WhatAKilledProcessLeftIsDeleted) {
  const TemporaryFolder folder;
  replace_file(folder / "file.12345.tmp", "half");      // as a killed process leaves it
  replace_file(folder / "file.mine.tmp", "no number");  // somebody's own
  replace_file(folder / "file.1.tmp.txt", "another name");
  const std::string living = folder / "file.77.tmp";  // of a process that is still writing
  replace_file(living, "half");
  const int descriptor = ::open(living.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(descriptor, LOCK_EX | LOCK_NB), 0);
  replace_file(folder / "file", "new");
  const std::vector<std::string> expected = {
      "file", "file.1.tmp.txt", "file.77.tmp", "file.mine.tmp"};
  EXPECT_EQ(names_in(folder.path()), expected);
  ::close(descriptor);
  check_replaceable(folder / "file");
  EXPECT_EQ(files_in(folder.path()), 3);
}

TEST(ReplaceFileTest, DevicesAndPipesAreWrittenToAndStay) {
  const TemporaryFolder folder;
  fs::create_symlink("/dev/full", folder / "full");
  EXPECT_NE(why(folder / "full").find("No space left on device"), std::string::npos);
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  replace_file("/dev/null", "lost");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));

  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  check_replaceable(folder / "pipe");  // does not wait for a reader
  std::string got;
  std::thread reader([&] { got = read_text(folder / "pipe"); });
  replace_file(folder / "pipe", "through");
  reader.join();
  EXPECT_EQ(got, "through");
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
}

TEST(ReplaceFileTest, AnOpenFileIsContinued) {
  const TemporaryFolder folder;
  const int file = ::open((folder / "log").c_str(), O_WRONLY | O_CREAT, 0666);
  ASSERT_EQ(::write(file, "before ", 7), 7);
  replace_file("/dev/fd/" + std::to_string(file), "now ");
  ASSERT_EQ(::write(file, "after", 5), 5);
  ::close(file);
  EXPECT_EQ(read_text(folder / "log"), "before now after");
}

TEST(ReplaceFileTest, FailuresLeaveNothingBehind) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "taken");
  EXPECT_NE(why(folder / "taken").find("is a folder"), std::string::npos);
  EXPECT_EQ(why(folder / "taken/").find("basic_"), std::string::npos);
  EXPECT_EQ(files_in(folder.path()), 1);
  EXPECT_EQ(files_in(folder / "taken"), 0);
  EXPECT_NE(
      error_of<std::exception>([&] {
        check_replaceable(folder / "no/file");
      }).find("cannot be written"),
      std::string::npos);
  replace_file(folder / "kept", "old");
  check_replaceable(folder / "kept");
  EXPECT_EQ(read_text(folder / "kept"), "old");
  EXPECT_EQ(files_in(folder.path()), 2);
}

TEST(ReplaceFileTest, AFailedRenameLeavesNoTemporary) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  // Another process puts a folder in the file's place again and again, so that some renames fail.
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) {
      ::mkdir(path.c_str(), 0777);
      ::rmdir(path.c_str());
      ::unlink(path.c_str());
    }
  });
  int failed = 0;
  // On a busy machine it may be a while before the other thread has its turn.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (failed < 20 && std::chrono::steady_clock::now() < deadline) {
    try {
      replace_file(path, "x");
    } catch (const std::runtime_error& error) {
      failed += std::string(error.what()).find("cannot be written") != std::string::npos ? 1 : 0;
    }
  }
  done = true;
  other.join();
  EXPECT_GT(failed, 0);
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().filename(), "file");
  }
}

TEST(ReadTextTest, AFolderIsAnErrorInWords) {
  const TemporaryFolder folder;
  const auto error = error_of<std::exception>([&] { read_text(folder.path()); });
  EXPECT_NE(error.find("cannot be read: Is a directory"), std::string::npos) << error;
}

TEST(FolderLockTest, LookingDoesNotKeepAnyoneOut) {
  const TemporaryFolder folder;
  EXPECT_FALSE(is_locked(folder.path()));
  {
    const FolderLock lock(folder.path());
  }
  std::atomic<bool> done{false};
  std::vector<std::thread> lookers;
  for (int i = 0; i < 3; ++i) {
    lookers.emplace_back([&] {
      while (!done) is_locked(folder.path());
    });
  }
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    try {
      const FolderLock lock(folder.path());
    } catch (const FolderBusy&) {
      ++refused;
    }
  }
  done = true;
  for (auto& looker : lookers) looker.join();
  EXPECT_EQ(refused, 0);
}

TEST(FolderLockTest, DozensOfProcessesTakeTurns) {
  constexpr int kProcesses = 48;
  const TemporaryFolder folder;
  replace_file(folder / "count", "0");
  auto first = std::make_unique<FolderLock>(folder.path());
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      first.reset();  // a child inherits the open file, and with it the parent's lock
      const auto lock = wait_for_lock(folder.path(), 60);
      if (!lock) ::_exit(1);
      replace_file(folder / "count", std::to_string(std::stoi(read_text(folder / "count")) + 1));
      ::_exit(0);
    }
    children.push_back(child);
  }
  EXPECT_TRUE(is_locked(folder.path()));
  first.reset();
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(read_text(folder / "count"), std::to_string(kProcesses));
  EXPECT_FALSE(is_locked(folder.path()));
}

}  // namespace
}  // namespace train
