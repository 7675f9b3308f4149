#pragma once
// Running other programs.

#include <string>
#include <vector>

namespace study {

/// Arguments or environment variables in the form exec expects: pointers into `texts`.
std::vector<char*> pointers_of(std::vector<std::string>& texts);

/// Resets SIGCHLD to its default, so that child processes can be waited for whatever our parent had set.
void expect_children();

constexpr int kSignal = 128;

/// Runs a program and waits for it. Returns its exit code, or kSignal + the number of the signal that ended it. Its
/// output goes to `output` if given, else to our own stdout and stderr.
int run_program(std::vector<std::string> words, std::string* output = nullptr);

}  // namespace study
