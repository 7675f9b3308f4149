#pragma once
// The results as tables for people, spreadsheets and papers. Tables depend on losses only, so the same results give
// the same bytes.

#include <string>
#include <vector>

#include "study/claims.h"

namespace study {

/// Whether a cell's rule is the best of its row at its g. False at g = 1, where all rules are the same.
bool is_best_rule(const VariantSummary& summary, size_t cell);
/// The same for the paper's numbers. The paper marks best rules for QK only.
bool is_papers_best_rule(size_t cell);

/// "0.8500 [0.8200, 0.8800]" of the baseline's steps, or how many seeds get to its final loss.
std::string words_of(const StepsToLoss& steps);

/// Table 1 with the paper's numbers in parentheses, every setting against the baselines in loss and in steps, noise,
/// variants, the best values of options and claims.
std::string to_markdown(
    const Folder& folder, const Results& results, const Analysis& analysis,
    const std::vector<Claim>& claims);
/// The settings with their losses and differences to the baselines, for a terminal.
std::string to_text(const Analysis& analysis);
/// One line per setting and variant.
std::string to_csv(const Analysis& analysis);
/// One line per step of every curve of differences to a baseline: mean and 95% interval.
std::string differences_csv(const Analysis& analysis);
/// Table 1 in the paper's layout (booktabs, multirow).
std::string to_latex(const Analysis& analysis);

}  // namespace study
