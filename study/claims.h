#pragma once
// The paper's eight claims, and a study's verdict on each.

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
  bool exploratory = false;  // the verdict rests on fewer than kEnoughSeeds seeds, or some failed
  std::vector<std::string> evidence = {};  // sentences with numbers, then the rule that decides
};

/// The verdict in words, marked if exploratory.
std::string words_of(const Claim& claim);

/// The two validations between which a mean difference goes from below zero to above and then stays there; {-1, -1}
/// if there are none.
std::pair<int64_t, int64_t> crossing(const Band& difference);

/// The main findings: which setting is lowest, by how much, how certainly, and which others could be the lowest too.
std::vector<std::string> conclusions(const Analysis& analysis);

std::vector<Claim> check_claims(
    const Folder& folder, const Results& results, const Analysis& analysis);

}  // namespace study
