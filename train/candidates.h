#pragma once
// What head groups do to the attention matrices of a model as it stands: candidates for a cut, each measured
// before a step, and written down.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "gpt/model.h"
#include "group_muon/diagnostics.h"
#include "group_muon/optimizer.h"
#include "train/files.h"

namespace train {

/// One way to cut the packed QKV matrix of a layer.
struct Candidate {
  std::string name;  // packed, three-way, or the grouping of Q, K and V, such as 6:random
  group_muon::Layout layout;
};

/// The two full updates, which every list of candidates begins with.
constexpr size_t kPacked = 0;
constexpr size_t kThreeWay = 1;

/// packed and three-way, then `groupings`: texts with commas between, each for Q, K and V alike (6:random) or with one for V
/// after a slash (6:random/all); none: every g that divides the heads, drawn at random. Where there are fewer key and value
/// heads, and g does not divide them, they stay whole.
std::vector<Candidate> make_candidates(
    const gpt::ModelShape& shape, const std::string& groupings, bool share_qk = false);

/// A QKV matrix as the next step takes it, and its gradient before it was clipped.
struct AttentionWeight {
  group_muon::Weight weight;
  group_muon::StepOptions options;
  torch::Tensor gradient;
};

/// Those that have gradients, layer after layer. `clip` is what gradients were multiplied with.
std::vector<AttentionWeight> attention_weights(group_muon::GroupMuon& muon, double clip = 1);

/// One of a weight's tensors under all candidates, each on all rows first, then on Q, K and V.
struct Measured {
  std::string of;  // gradient or momentum
  std::vector<std::vector<group_muon::Whitening>> by_candidate;
};

/// For each weight: of the gradient itself, and of what the step orthogonalizes.
std::vector<std::vector<Measured>> measure_weights(
    const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
    group_muon::Accuracy accuracy);

/// All numbers of a whitening, under the names of its fields, and its comparisons with both full updates of the same rows.
nlohmann::ordered_json to_json(
    const group_muon::Whitening& part, const group_muon::Whitening& packed,
    const group_muon::Whitening& three_way, double lr);

/// RUN/diagnostics.jsonl: a line for each step, weight, tensor, candidate and part of the rows.
class DiagnosticsLog {
 public:
  /// Lines from `step` on, by a run that was cut off, are dropped.
  DiagnosticsLog(
      const std::string& folder, int64_t step, std::vector<Candidate> candidates,
      group_muon::Accuracy accuracy);
  /// Before a step is made.
  void write(int64_t step, const std::vector<AttentionWeight>& weights);
  void sync() { lines_.sync(); }

 private:
  OutputFile lines_;
  std::vector<Candidate> candidates_;
  group_muon::Accuracy accuracy_;
};

}  // namespace train
