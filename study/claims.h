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
  bool exploratory = false;  // the verdict rests on fewer seeds than kEnoughSeeds, or some failed
  std::vector<std::string> evidence = {};  // sentences with numbers, and what decides
};

/// The verdict, and whether it is exploratory.
std::string words_of(const Claim& claim);

/// Where a mean difference over training comes to stay above zero, having been below: between these two validations;
/// {-1, -1} if it does not.
std::pair<int64_t, int64_t> crossing(const Band& difference);

/// What one would say first: which setting is lowest, by how much, how sure, and which cannot be told from it.
std::vector<std::string> conclusions(const Analysis& analysis);

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis);

}  // namespace study
