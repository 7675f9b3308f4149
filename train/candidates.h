#pragma once
// Candidate groupings of a model's attention matrices. Each is measured before a step and written to a log.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "gpt/model.h"
#include "group_muon/diagnostics.h"
#include "group_muon/optimizer.h"
#include "train/files.h"

namespace train {

/// One way to split the packed QKV matrix of a layer into blocks.
struct Candidate {
  std::string name;  // packed, three-way, or the grouping of Q, K and V, such as 6:random
  group_muon::Layout layout;
};

/// Indices of the two full updates, which come first in every list of candidates.
constexpr size_t kPacked = 0;
constexpr size_t kThreeWay = 1;

/// Q, K and V of a layer as one matrix, with this factor on their learning rate.
group_muon::Layout packed_as_one(const gpt::ModelShape& shape, double qkv_lr);

/// Returns packed and three-way, then `groupings`, a comma-separated list. Each grouping applies to Q, K and V
/// (6:random), or names a separate one for V after a slash (6:random/all). An empty list means every g that divides
/// the heads, with random groups. If there are fewer key and value heads and g does not divide them, K and V stay
/// ungrouped. `qkv_lr` is a factor on the learning rate of all.
std::vector<Candidate> make_candidates(
    const gpt::ModelShape& shape, const std::string& groupings, bool share_qk = false,
    double qkv_lr = 1);

/// A QKV matrix as input of the next step, and its gradient before clipping.
struct AttentionWeight {
  group_muon::Weight weight;
  group_muon::StepOptions options;
  torch::Tensor gradient;
};

/// The QKV matrices that have gradients, layer by layer. `clip` is the factor that clipping applied to gradients.
std::vector<AttentionWeight> attention_weights(group_muon::GroupMuon& muon, double clip = 1);

/// Measurements of one of a weight's tensors: per candidate, first over all rows, then for Q, K and V.
struct Measured {
  std::string of;  // gradient or momentum
  std::vector<std::vector<group_muon::Whitening>> by_candidate;
};

/// For each weight, measures the gradient and then the momentum that the step orthogonalizes.
std::vector<std::vector<Measured>> measure_weights(
    const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
    group_muon::Accuracy accuracy);

/// All values of a whitening, under their field names, and its comparisons with both full updates of the same rows.
nlohmann::ordered_json to_json(
    const group_muon::Whitening& part, const group_muon::Whitening& packed,
    const group_muon::Whitening& three_way, double lr);

/// RUN/diagnostics.jsonl: one line per step, weight, tensor, candidate and part of the rows.
class DiagnosticsLog {
 public:
  /// Drops lines for `step` and later, which an interrupted run may have left.
  DiagnosticsLog(
      const std::string& folder, int64_t step, std::vector<Candidate> candidates,
      group_muon::Accuracy accuracy);
  /// Call before the step is taken.
  void write(int64_t step, const std::vector<AttentionWeight>& weights);
  void sync() { lines_.sync(); }
  /// What was wrong with the log that is continued.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  std::vector<std::string> notes_;
  OutputFile lines_;
  std::vector<Candidate> candidates_;
  group_muon::Accuracy accuracy_;
};

}  // namespace train
