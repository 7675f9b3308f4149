#pragma once
// The results as tables for people, spreadsheets and papers. They depend on losses only, so the same results give the
// same bytes.

#include <string>
#include <vector>

#include "study/claims.h"

namespace study {

/// Whether a cell's rule is the best of those that Table 1 has for its row and g. At g = 1 all are the same.
bool is_best_rule(const VariantSummary& summary, size_t cell);
/// The same in the paper, which marks it for QK only.
bool is_papers_best_rule(size_t cell);

/// Table 1 with the paper's numbers in parentheses, every setting against the baselines, other variants, noise, claims.
std::string to_markdown(
    const Folder& folder, const Results& results, const Analysis& analysis,
    const std::vector<Claim>& claims);
/// A line a setting and variant.
std::string to_csv(const Analysis& analysis);
/// Table 1 in the paper's layout (booktabs, multirow).
std::string to_latex(const Analysis& analysis);

}  // namespace study
