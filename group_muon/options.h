#pragma once
// Every option of the optimizer, declared once. The list gives GroupMuonOptions its fields, the operators the text they
// take, and Python, the trainer and the documents their names, defaults and help (./run generate).

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "group_muon/layout.h"
#include "group_muon/plan.h"

// type, name, default, part (see Part), check (options.cpp; `any`: none, or together with others), help
#define GROUP_MUON_OPTIONS(OPTION)                                                                 \
  OPTION(                                                                                          \
      double, lr, 3.6e-4, kWeight, not_negative,                                                   \
      "learning rate; under the default scale it is the size of one entry's step")                 \
  OPTION(                                                                                          \
      double, full_lr, 0, kWeight, not_negative,                                                   \
      "learning rate whose fractions are meant in groupings such as 1,6:random@0.5lr; 0: lr at "   \
      "construction")                                                                              \
  OPTION(double, momentum, 0.95, kStep, fraction, "momentum coefficient μ, in [0, 1)")             \
  OPTION(bool, nesterov, true, kStep, any, "orthogonalize G + μM instead of M")                    \
  OPTION(                                                                                          \
      bool, average, false, kStep, any,                                                            \
      "momentum as an average, μM + (1-μ)G, instead of a sum, μM + G")                             \
  OPTION(double, weight_decay, 0, kWeight, not_negative, "decoupled: W ← (1 - lr·weight_decay)·W") \
  OPTION(Layout, layout, {}, kWeight, any, "where the heads lie and how they are grouped")         \
  OPTION(                                                                                          \
      std::vector<std::string>, names, {}, kWeight, any,                                           \
      "stable names of a group's weights, on which random partitions depend; none: their indices " \
      "in the optimizer")                                                                          \
  OPTION(int64_t, seed, 0, kStep, any, "seed of the random partitions")                            \
  OPTION(                                                                                          \
      std::vector<std::string>, partitions, {}, kWeight, any,                                      \
      "names under which weights draw their partitions; weights with the same name, such as Q "    \
      "and K of a layer, share them")                                                              \
  OPTION(                                                                                          \
      std::string, method, "auto", kOrthogonalize, parses<parse_method>,                           \
      "orthogonalization: newton_schulz; gram (the same polynomial on the small Gram matrix: "     \
      "less work); accurate_gram (that matrix in fp32: less rounding); exact (SVD); auto: gram "   \
      "where one of our own engines runs, else newton_schulz")                                     \
  OPTION(                                                                                          \
      std::string, coefficients, "quintic", kOrthogonalize, any,                                   \
      "polynomials of the iterations: quintic (Muon's), polar_express or you_jiacheng (a list of " \
      "five by You Jiacheng)")                                                                     \
  OPTION(                                                                                          \
      std::vector<double>, custom_coefficients, {}, kOrthogonalize, triples,                       \
      "polynomials of your own instead of the named ones: a, b, c of each iteration")              \
  OPTION(                                                                                          \
      int64_t, steps, 5, kOrthogonalize, step_count,                                               \
      "number of iterations, for named coefficients")                                              \
  OPTION(                                                                                          \
      int64_t, tail_steps, 0, kOrthogonalize, step_count,                                          \
      "number of further iterations, which converge to the exact polar factor")                    \
  OPTION(                                                                                          \
      std::vector<int64_t>, restarts, {}, kOrthogonalize, any,                                     \
      "Gram methods: iterations after which to start again from XXᵀ, against rounding; none: "     \
      "chosen for each block")                                                                     \
  OPTION(                                                                                          \
      std::string, precision, "auto", kOrthogonalize, parses<parse_precision>,                     \
      "precision of the iterations: bfloat16, float32 or float64; auto: bfloat16 where the "       \
      "device has it in hardware, else float32. The first step replaces auto by the chosen one")   \
  OPTION(                                                                                          \
      std::string, engine, "auto", kOrthogonalize, parses<parse_engine>,                           \
      "code that runs the Gram methods: portable (libtorch), neon, avx2, avx512 or avx512_bf16; "  \
      "auto: the best for the CPU")                                                                \
  OPTION(                                                                                          \
      double, eps, 1e-7, kOrthogonalize, not_negative,                                             \
      "guard against division by zero: a block is divided by ‖X‖·(1 + eps)")                       \
  OPTION(                                                                                          \
      bool, relative_eps, true, kOrthogonalize, any,                                               \
      "false: divide by ‖X‖ + eps, as Muon's first script does")                                   \
  OPTION(                                                                                          \
      double, rank_tolerance, 0, kOrthogonalize, fraction,                                         \
      "method exact: singular values up to this fraction of the largest count as 0; 0: by "        \
      "precision")                                                                                 \
  OPTION(                                                                                          \
      std::string, base_scale, "sqrt_max", kStep, parses<parse_scale_rule>,                        \
      "factor on lr for the reference shape: naive 1, keller_jordan √max(1, out/in), mup "         \
      "√(out/in), moonlight 0.2·√max(out, in), sqrt_max √max(out, in)")                            \
  OPTION(                                                                                          \
      std::string, transfer, "same", kStep, scale_or_same,                                         \
      "rule α that moves lr from the reference shape to a block's, by α(block)/α(reference): "     \
      "a name as for base_scale; same: base_scale itself; naive: no transfer")                     \
  OPTION(                                                                                          \
      std::string, reference, "segment", kStep, parses<parse_scale_reference>,                     \
      "shape that lr is meant for: segment (Q, K or V alone) or matrix (the whole weight)")        \
  OPTION(                                                                                          \
      bool, match_spectral, false, kStep, any,                                                     \
      "scale a segment's update down to the spectral norm of its largest block, since the blocks " \
      "together have a larger one")                                                                \
  OPTION(                                                                                          \
      bool, row_balance, false, kStep, any,                                                        \
      "divide each output neuron's row of a block by its norm before orthogonalizing (MuonEq)")

namespace group_muon {

/// Options of a parameter group. As in libtorch's own optimizers, a field that a group leaves at its initial
/// value takes the value of the optimizer's defaults. So leave the layout of the defaults plain if any group
/// should be plain.
struct GroupMuonOptions : public torch::optim::OptimizerCloneableOptions<GroupMuonOptions> {
  GroupMuonOptions() = default;
  GroupMuonOptions(double lr);

#define GROUP_MUON_FIELD(type, name, initial, ...) TORCH_ARG(type, name) = initial;
  GROUP_MUON_OPTIONS(GROUP_MUON_FIELD)
#undef GROUP_MUON_FIELD

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

/// Where an option matters. Each part includes those before it.
enum class Part {
  kOrthogonalize,  // to a block
  kStep,           // to all weights that are stepped in one call
  kWeight,         // to single weights
};
/// orthogonalize, step or weight.
std::string to_string(Part part);

/// An entry of the list. `shown_as` is the name that errors use.
struct Option {
  const char* name;
  const char* type;  // as in an operator's schema: float, int, bool, str, float[], int[], str[]
  std::string initial;
  Part part;
  const char* help;
  std::string (*get)(const GroupMuonOptions& options);
  void (*set)(GroupMuonOptions& options, std::string_view text, std::string_view shown_as);
  void (*check)(const GroupMuonOptions& options, std::string_view shown_as);
};

/// The list. Values have a text form: numbers survive a round trip exactly, lists are separated by commas.
const std::vector<Option>& option_list();

/// "momentum=0.95 nesterov=true restarts=1,3" → options, of this part and those before it. Other options have their
/// defaults. Errors suggest the nearest name.
GroupMuonOptions parse_options(std::string_view text, Part part);

/// lr as a fraction of full_lr; 1 if that is 0.
double lr_fraction(const GroupMuonOptions& options);

/// Converts the options for the step. Throws if a value is invalid.
StepOptions step_options(const GroupMuonOptions& options);

}  // namespace group_muon
