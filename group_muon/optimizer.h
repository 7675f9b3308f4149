#pragma once
// GroupMuon as a libtorch optimizer: options, state and the usual contract over group_muon::step.

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

/// Options of a parameter group. As with libtorch's own optimizers, a group's field that is as
/// constructed takes the value of the optimizer's defaults. So leave the defaults' layout plain if
/// some group is to be plain.
struct GroupMuonOptions : public torch::optim::OptimizerCloneableOptions<GroupMuonOptions> {
  GroupMuonOptions(double lr = 3.6e-4);

  /// The size of one entry's step under the default scale.
  TORCH_ARG(double, lr) = 3.6e-4;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  /// Momentum as running average, μM + (1-μ)G, instead of as sum, μM + G.
  TORCH_ARG(bool, average) = false;
  /// Decoupled: W ← (1 - lr·weight_decay)·W.
  TORCH_ARG(double, weight_decay) = 0;
  /// Where the heads of this group's weights lie, and how they are grouped.
  TORCH_ARG(Layout, layout);
  /// Stable names of this group's weights: the random partitions depend on them. Without names, the
  /// place in the optimizer counts.
  TORCH_ARG(std::vector<std::string>, names);
  /// Other names for the random partitions alone: weights of one name draw the same, such as Q and
  /// K of a layer. Empty: as `names`.
  TORCH_ARG(std::vector<std::string>, partitions);
  TORCH_ARG(int64_t, seed) = 0;

  /// newton_schulz; gram, the same polynomial for less work; accurate_gram, with less rounding; exact;
  /// auto: gram where an engine of our own runs, else newton_schulz.
  TORCH_ARG(std::string, method) = "auto";
  /// quintic, polar_express, you_jiacheng.
  TORCH_ARG(std::string, coefficients) = "quintic";
  /// Own coefficients a₁, b₁, c₁, a₂, …, one triple a step, instead of the named ones.
  TORCH_ARG(std::vector<double>, custom_coefficients);
  TORCH_ARG(int64_t, steps) = 5;
  /// Further steps that converge to the exact polar factor.
  TORCH_ARG(int64_t, tail_steps) = 0;
  /// Gram methods: steps after which to start anew; empty: chosen, block by block.
  TORCH_ARG(std::vector<int64_t>, restarts);
  /// bfloat16, float32, float64; auto: bfloat16 where the device has it in hardware, else float32. The first step
  /// puts the word that auto comes to here, so that a saved optimizer keeps it.
  TORCH_ARG(std::string, precision) = "auto";
  /// Which code runs the Gram methods: auto, portable, neon, avx2, avx512, avx512_bf16 (engine.h).
  TORCH_ARG(std::string, engine) = "auto";
  TORCH_ARG(double, eps) = 1e-7;
  /// Divide by ‖X‖·(1 + eps); otherwise by ‖X‖ + eps.
  TORCH_ARG(bool, relative_eps) = true;
  /// exact: singular values up to this fraction of the largest count as zero; 0: by precision.
  TORCH_ARG(double, rank_tolerance) = 0;

  /// naive, keller_jordan, mup, moonlight, sqrt_max: α on the reference shape.
  TORCH_ARG(std::string, base_scale) = "sqrt_max";
  /// The same names, or "same" as base_scale: lr moves to the block's shape by
  /// α(block)/α(reference).
  TORCH_ARG(std::string, transfer) = "same";
  /// segment (Q, K or V alone) or matrix (the whole weight).
  TORCH_ARG(std::string, reference) = "segment";

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  bool operator==(const GroupMuonOptions& other) const;

  /// These options, with `defaults` where they are as constructed.
  GroupMuonOptions merged_with(const GroupMuonOptions& defaults) const;

 private:
  /// Calls visit(name, pointer to member) for every field.
  template <typename Visit>
  static void for_each_field(Visit&& visit);
};

/// The options as the step wants them; throws where a value makes no sense.
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

  /// libtorch's own replaces the options of optimizers it does not know by the defaults.
  void add_param_group(  // NOLINT(bugprone-derived-method-shadowing-base-method): on purpose
      const torch::optim::OptimizerParamGroup& param_group);

  /// Another grouping from the next step on, for the segments of that name ("" for all) in every
  /// parameter group that has one. Momentum is kept.
  void set_grouping(const GroupingSchedule& grouping, std::string_view segment);

  /// The weights with gradients as the next step takes them, those of one kind of options together. Makes no step.
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
