#pragma once
// The paper's eight claims, and what a study says to each.

#include <string>
#include <vector>

#include "study/analysis.h"

namespace study {

enum class Verdict { kUndecided, kSupported, kContradicted };
std::string to_string(Verdict verdict);

struct Claim {
  int number = 0;
  std::string text;
  Verdict verdict = Verdict::kUndecided;
  std::vector<std::string> evidence;  // sentences with numbers, and what decides
};

/// Where a mean difference over training comes to stay on the other side of zero, having begun below it: the step, interpolated between
/// validations; -1 if it does not.
double crossing_step(const Band& difference);

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis);

}  // namespace study
