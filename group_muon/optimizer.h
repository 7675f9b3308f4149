#pragma once
// GroupMuon as a libtorch optimizer: options, state and the usual interface around group_muon::step.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group_muon/layout.h"
#include "group_muon/step.h"

namespace group_muon {

/// Options of a parameter group. As in libtorch's own optimizers, a field that a group leaves at its initial
/// value takes the value of the optimizer's defaults. So leave the layout of the defaults plain if any group
/// should be plain.
struct GroupMuonOptions : public torch::optim::OptimizerCloneableOptions<GroupMuonOptions> {
  GroupMuonOptions(double lr = 3.6e-4);

  /// The size of one entry's step under the default scale.
  TORCH_ARG(double, lr) = 3.6e-4;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  /// Momentum as a running average, μM + (1-μ)G, instead of a sum, μM + G.
  TORCH_ARG(bool, average) = false;
  /// Decoupled: W ← (1 - lr·weight_decay)·W.
  TORCH_ARG(double, weight_decay) = 0;
  /// Where the heads of this group's weights lie, and how they are grouped.
  TORCH_ARG(Layout, layout);
  /// Stable names of this group's weights; the random partitions depend on them. Default: each weight's
  /// index in the optimizer.
  TORCH_ARG(std::vector<std::string>, names);
  /// Names used only for the random partitions. Weights with the same name draw the same partition, such as
  /// Q and K of a layer. Default: `names`.
  TORCH_ARG(std::vector<std::string>, partitions);
  TORCH_ARG(int64_t, seed) = 0;

  /// newton_schulz; gram (the same polynomial with less work); accurate_gram (less rounding); exact;
  /// auto (gram with a SIMD engine, else newton_schulz).
  TORCH_ARG(std::string, method) = "auto";
  /// quintic, polar_express, you_jiacheng.
  TORCH_ARG(std::string, coefficients) = "quintic";
  /// Custom coefficients a₁, b₁, c₁, a₂, …, one triple per step, instead of the named ones.
  TORCH_ARG(std::vector<double>, custom_coefficients);
  TORCH_ARG(int64_t, steps) = 5;
  /// Additional steps that converge to the exact polar factor.
  TORCH_ARG(int64_t, tail_steps) = 0;
  /// Gram methods: steps after which to restart. Empty: chosen for each block.
  TORCH_ARG(std::vector<int64_t>, restarts);
  /// bfloat16, float32, float64; auto: bfloat16 if the device has it in hardware, else float32. The first step
  /// replaces auto by the chosen precision, so a saved optimizer keeps it.
  TORCH_ARG(std::string, precision) = "auto";
  /// Which code runs the Gram methods: auto, portable, neon, avx2, avx512, avx512_bf16 (engine.h).
  TORCH_ARG(std::string, engine) = "auto";
  TORCH_ARG(double, eps) = 1e-7;
  /// Divide by ‖X‖·(1 + eps); otherwise by ‖X‖ + eps.
  TORCH_ARG(bool, relative_eps) = true;
  /// exact: singular values up to this fraction of the largest count as zero. 0: by precision.
  TORCH_ARG(double, rank_tolerance) = 0;

  /// naive, keller_jordan, mup, moonlight, sqrt_max: α on the reference shape.
  TORCH_ARG(std::string, base_scale) = "sqrt_max";
  /// The rule α that transfers lr to the block's shape, by α(block)/α(reference): the same names, or "same" for
  /// base_scale.
  TORCH_ARG(std::string, transfer) = "same";
  /// segment (Q, K or V alone) or matrix (the whole weight).
  TORCH_ARG(std::string, reference) = "segment";

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  bool operator==(const GroupMuonOptions& other) const;

  /// These options, with fields at their initial value taken from `defaults`.
  GroupMuonOptions merged_with(const GroupMuonOptions& defaults) const;

 private:
  /// Calls visit(name, pointer to member) for every field.
  template <typename Visit>
  static void for_each_field(Visit&& visit);
};

/// Converts the options for the step. Throws if a value is invalid.
StepOptions step_options(const GroupMuonOptions& options);

struct GroupMuonParamState
    : public torch::optim::OptimizerCloneableParamState<GroupMuonParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class GroupMuon : public torch::optim::Optimizer {
 public:
  explicit GroupMuon(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      GroupMuonOptions defaults = {});
  explicit GroupMuon(std::vector<torch::Tensor> params, GroupMuonOptions defaults = {});

  /// Hides libtorch's version, which replaces the options of optimizers it does not know by the defaults.
  void add_param_group(  // NOLINT(bugprone-derived-method-shadowing-base-method): on purpose
      const torch::optim::OptimizerParamGroup& param_group);

  /// Changes the grouping from the next step on, for the segments with this name ("": all segments) in every
  /// parameter group that has one. Momentum is kept.
  void set_grouping(const GroupingSchedule& grouping, std::string_view segment);

  /// The weights that the next step would update (those with gradients), batched by equal options. Makes no step.
  std::vector<std::pair<StepOptions, std::vector<Weight>>> weights_of_next_step();

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  template <typename Self, typename Archive>
  static void serialize(Self& self, Archive& archive) {
    _TORCH_OPTIM_SERIALIZE_WITH_TEMPLATE_ARG(GroupMuon);
  }
};

}  // namespace group_muon
