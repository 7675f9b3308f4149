#pragma once
// When and why grouping helps, measured: what orthogonalizing a matrix in groups of heads gains to first
// order, and what its larger norm costs (the paper's Proposition 1 and its non-ideal form). Pure functions of
// tensors; docs/theory.md goes through the formulas.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "group_muon/plan.h"

namespace group_muon {

/// Singular values above this part of the largest count as rank. A fourth rank counts all that is above machine
/// precision: default_rank_tolerance() of the data.
constexpr std::array<double, 3> kRankTolerances = {1e-1, 1e-2, 1e-3};
constexpr size_t kRanks = kRankTolerances.size() + 1;

enum class Accuracy {
  kExact,     // singular values in fp64
  kEstimate,  // roots of the eigenvalues of XXᵀ: faster; wrong by up to 3e-7 of the largest
};

/// What the singular values of blocks say, summed over the blocks.
struct Spectra {
  double nuclear_norm = 0;                // Σ‖X_i‖_*
  std::array<double, kRanks> ranks = {};  // Σ rank(X_i), by tolerance
  double stable_rank = 0;                 // Σ ‖X_i‖² / σ₁²
  double effective_rank = 0;              // Σ exp(entropy of σ / Σσ)
  int64_t count = 0;                      // blocks
  /// The spectrum: σ / σ₁ at 0, 1/16 … 1 of the way down, mean over the blocks.
  std::array<double, 17> quantiles = {};
};

/// NaN all over: of what has none.
Spectra no_spectra();

/// blocks: [count, rows, cols]; no_spectra() where there is NaN or Inf. `data` is the type they had before they were cast, if
/// they were: machine precision is its.
Spectra spectra(
    const at::Tensor& blocks, Accuracy accuracy, std::optional<c10::ScalarType> data = {});

/// Of both sets of blocks together.
Spectra operator+(const Spectra& a, const Spectra& b);

/// Singular values in fp64, falling: [count, min(rows, cols)].
at::Tensor singular_values(const at::Tensor& blocks);

/// An update O = A(X) under some layout, on all of a weight or on one segment of it. The step is lr·sO, where s is
/// each block's scale.
struct Whitening {
  std::string segment = {};  // empty: all of the weight
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t blocks = 0;
  std::optional<Spectra> of_blocks = {};         // of X; none where blocks reach beyond the segment
  double first_order = 0;                        // ⟨G, sO⟩
  double squared_norm = 0;                       // ‖O‖²
  double step_squared_norm = 0;                  // ‖sO‖²
  std::vector<double> head_norms = {};           // ‖X_h‖ of every head of the segment …
  std::vector<double> whitened_head_norms = {};  // … and ‖O_h‖
};

/// Orthogonalizes X = `direction` as weight.layout says, with the optimizer's own iteration, and measures the result:
/// first all of the weight, then every segment of `heads`, another layout of it. G = weight.grad.
std::vector<Whitening> measure(
    const at::Tensor& direction, const Weight& weight, const Layout& heads,
    const StepOptions& options, Accuracy accuracy);

/// Both together, as of one update: of other rows, or of another weight.
Whitening operator+(const Whitening& a, const Whitening& b);

/// The update itself, sO, in the weight's shape: a step is W ← W - lr·sO.
at::Tensor scaled_update(
    const at::Tensor& direction, const Weight& weight, const StepOptions& options);

/// The decrease that β-smoothness guarantees a step: lr⟨G, sO⟩ - β/2·lr²‖sO‖². With the exact polar factor of G
/// and s = 1 these are the paper's D_all and D_grp.
double guaranteed_decrease(const Whitening& update, double lr, double beta);

/// For which smoothness a grouped update is guaranteed more than a full one.
struct BreakEven {
  enum class Pays {
    kAlways,
    kNever,
    kBelow,
    kAbove,
    kUnknown
  };  // the last: there is NaN, or no lr
  Pays pays = Pays::kNever;
  double beta = 0;  // where both are guaranteed the same
};

/// always, never, below, above, unknown; and "as long as β < 12.3", …
std::string to_string(BreakEven::Pays pays);
std::string to_string(const BreakEven& break_even);

struct Comparison {
  std::optional<double> gain = {};  // Σ‖X_i‖_* - ‖X‖_*, not negative for finer blocks
  std::optional<std::array<double, kRanks>> ideal_cost = {};  // Σ r_i - r
  double norm_cost = 0;                                       // Σ‖O_i‖² - ‖O‖²
  double first_order_gain = 0;                                // Σ⟨G_i, sO_i⟩ - ⟨G, sO⟩
  BreakEven break_even = {};
};

/// Of the same rows of the same weight. The break-even needs a learning rate above 0.
Comparison compare(const Whitening& grouped, const Whitening& full, double lr);

/// Standard deviation over mean of the heads' norms: 0 if all are alike.
double imbalance(const std::vector<double>& norms);

}  // namespace group_muon
