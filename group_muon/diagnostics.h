#pragma once
// Measures when and why grouping helps: the first-order gain of orthogonalizing a matrix in groups of heads, and the
// cost of the larger norm (the paper's Proposition 1 and its non-ideal form). Pure functions of tensors;
// docs/theory.md explains the formulas.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "group_muon/plan.h"

namespace group_muon {

/// Rank tolerances: singular values above this fraction of the largest are counted. A fourth rank counts all singular
/// values above machine precision, the data's default_rank_tolerance().
constexpr std::array<double, 3> kRankTolerances = {1e-1, 1e-2, 1e-3};
constexpr size_t kRanks = kRankTolerances.size() + 1;

enum class Accuracy {
  kExact,     // singular values in fp64
  kEstimate,  // square roots of the eigenvalues of XXᵀ: faster; error up to 3e-7 of the largest
};

/// Statistics of the singular values of blocks, summed over the blocks.
struct Spectra {
  double nuclear_norm = 0;                // Σ‖X_i‖_*
  std::array<double, kRanks> ranks = {};  // Σ rank(X_i), by tolerance
  double stable_rank = 0;                 // Σ ‖X_i‖² / σ₁²
  double effective_rank = 0;              // Σ exp(entropy of σ / Σσ)
  int64_t count = 0;                      // number of blocks
  /// The spectrum: σ / σ₁ at 0, 1/16 … 1 of the way down, averaged over the blocks.
  std::array<double, 17> quantiles = {};
};

/// All NaN: for blocks that have no singular values.
Spectra no_spectra();

/// blocks: [count, rows, cols]. Returns no_spectra() if they contain NaN or Inf. `data` is the type of the blocks
/// before any cast; it determines machine precision.
Spectra spectra(
    const at::Tensor& blocks, Accuracy accuracy, std::optional<c10::ScalarType> data = {});

/// The spectra of both sets of blocks together.
Spectra operator+(const Spectra& a, const Spectra& b);

/// Singular values in fp64, in decreasing order: [count, min(rows, cols)].
at::Tensor singular_values(const at::Tensor& blocks);

/// An update O = A(X) under some layout, for a whole weight or one of its segments. The step is lr·sO, where s is the
/// scale of each block.
struct Whitening {
  std::string segment = {};  // empty: the whole weight
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t blocks = 0;
  std::optional<Spectra> of_blocks = {};         // of X; none if blocks extend beyond the segment
  double first_order = 0;                        // ⟨G, sO⟩
  double squared_norm = 0;                       // ‖O‖²
  double step_squared_norm = 0;                  // ‖sO‖²
  std::vector<double> head_norms = {};           // ‖X_h‖ of each head of the segment …
  std::vector<double> whitened_head_norms = {};  // … and ‖O_h‖
};

/// Orthogonalizes X = `direction` under weight.layout with the optimizer's own iteration and measures the result:
/// first for the whole weight, then for each segment of `heads`, another layout of the same weight. G = weight.grad.
std::vector<Whitening> measure(
    const at::Tensor& direction, const Weight& weight, const Layout& heads,
    const StepOptions& options, Accuracy accuracy);

/// Both as one update; they are of different rows or different weights.
Whitening operator+(const Whitening& a, const Whitening& b);

/// The update itself, sO, in the weight's shape: a step is W ← W - lr·sO.
at::Tensor scaled_update(
    const at::Tensor& direction, const Weight& weight, const StepOptions& options);

/// The decrease of the loss that β-smoothness guarantees for a step: lr⟨G, sO⟩ - β/2·lr²‖sO‖². With the exact polar
/// factor of G and s = 1 these are the paper's D_all and D_grp.
double guaranteed_decrease(const Whitening& update, double lr, double beta);

/// The smoothness β for which a grouped update has a larger guaranteed decrease than a full one.
struct BreakEven {
  enum class Pays { kAlways, kNever, kBelow, kAbove, kUnknown };  // kUnknown: NaN, or lr = 0
  Pays pays = Pays::kNever;
  double beta = 0;  // where both guarantees are equal
};

/// Text: always, never, below, above, unknown; for a BreakEven also "as long as β < 12.3".
std::string to_string(BreakEven::Pays pays);
std::string to_string(const BreakEven& break_even);

struct Comparison {
  std::optional<double> gain = {};  // Σ‖X_i‖_* - ‖X‖_*; nonnegative for finer blocks
  std::optional<std::array<double, kRanks>> ideal_cost = {};  // Σ r_i - r
  double norm_cost = 0;                                       // Σ‖O_i‖² - ‖O‖²
  double first_order_gain = 0;                                // Σ⟨G_i, sO_i⟩ - ⟨G, sO⟩
  BreakEven break_even = {};
};

/// Compares two updates of the same rows of the same weight. The break-even needs lr > 0.
Comparison compare(const Whitening& grouped, const Whitening& full, double lr);

/// Standard deviation of the heads' norms divided by their mean: 0 if all are equal.
double imbalance(const std::vector<double>& norms);

}  // namespace group_muon
