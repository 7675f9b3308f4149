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

/// packed and three-way, then `groupings`: texts with commas between, or none for every g that divides the heads, drawn
/// at random.
std::vector<Candidate> make_candidates(const gpt::ModelShape& shape, const std::string& groupings);

/// A QKV matrix as the next step takes it.
struct AttentionWeight {
  group_muon::Weight weight;
  group_muon::StepOptions options;
};

/// Those that have gradients, layer after layer.
std::vector<AttentionWeight> attention_weights(group_muon::GroupMuon& muon);

/// A weight with all candidates applied to one of its tensors. The comparisons are of all rows first, then of Q, K, V.
struct Measured {
  std::string of;  // gradient or momentum
  std::vector<std::vector<group_muon::Whitening>> by_candidate;
};

/// For each weight: of the gradient itself, and of what the step orthogonalizes.
std::vector<std::vector<Measured>> measure_weights(
    const std::vector<AttentionWeight>& weights, const std::vector<Candidate>& candidates,
    group_muon::Accuracy accuracy);

/// All numbers of it, under the names of its fields.
nlohmann::ordered_json whitening_json(const group_muon::Whitening& part);

/// RUN/diagnostics.jsonl: a line for each step, weight, tensor, candidate and part of the rows.
class DiagnosticsLog {
 public:
  /// Lines from `step` on, by a run that was cut off, are dropped.
  DiagnosticsLog(
      const std::string& folder, int64_t step, std::vector<Candidate> candidates,
      group_muon::Accuracy accuracy);
  /// Before a step is made.
  void write(int64_t step, group_muon::GroupMuon& muon);
  void sync() { lines_.sync(); }

 private:
  OutputFile lines_;
  std::vector<Candidate> candidates_;
  group_muon::Accuracy accuracy_;
};

}  // namespace train
