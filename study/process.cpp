#include "study/process.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

namespace study {

std::vector<char*> pointers_of(std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (auto& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

void expect_children() { std::signal(SIGCHLD, SIG_DFL); }

int run_program(std::vector<std::string> words, std::string* output) {
  expect_children();
  int ends[2] = {-1, -1};
  if (output != nullptr) {
    TORCH_CHECK(pipe2(ends, O_CLOEXEC) == 0, "cannot create a pipe: ", std::strerror(errno));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (output != nullptr) {
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  }
  const auto arguments = pointers_of(words);
  pid_t process = 0;
  const int error =
      posix_spawnp(&process, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (output != nullptr) {
    close(ends[1]);
    char buffer[256];
    for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
      output->append(buffer, static_cast<size_t>(count));
    }
    close(ends[0]);
  }
  TORCH_CHECK(error == 0, "cannot start ", words[0], ": ", std::strerror(error));
  int status = 0;
  pid_t ended = 0;
  do {
    ended = waitpid(process, &status, 0);
  } while (ended < 0 && errno == EINTR);
  if (ended != process) return 1;
  return WIFSIGNALED(status) ? kSignal + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace study
