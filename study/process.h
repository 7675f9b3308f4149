#pragma once
// Other programs.

#include <string>
#include <vector>

namespace study {

/// Words or variables as exec takes them; they live as long as `texts`.
std::vector<char*> pointers_of(std::vector<std::string>& texts);

/// From now on the ends of our processes can be known, whatever the one that started us had set.
void expect_children();

/// Runs a program to its end and returns its exit code, or 1 if a signal ended it. What it prints goes to `output`, or,
/// without one, where ours goes.
int run_program(std::vector<std::string> words, std::string* output = nullptr);

}  // namespace study
