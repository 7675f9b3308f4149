#pragma once
// Training time by part of the step.

#include <array>
#include <chrono>
#include <cstddef>

namespace gpt {

enum class Part {
  kMatmul,
  kAttention,
  kNorm,
  kActivation,
  kLoss,
  kWeights,  // copying weights to the precision of products
  kModel,    // all of the above, if they cannot be timed separately
  kOptimizer,
  kData,
  kDiagnostics,
  kCount
};

constexpr std::array<const char*, static_cast<size_t>(Part::kCount)> kPartNames = {
    "matmul",        "attention", "normalisation", "activation", "loss and embedding",
    "weight copies", "model",     "optimizer",     "data",       "diagnostics"};

class Profile {
 public:
  double& operator[](Part part) { return seconds_[static_cast<size_t>(part)]; }
  double operator[](Part part) const { return seconds_[static_cast<size_t>(part)]; }

 private:
  std::array<double, static_cast<size_t>(Part::kCount)> seconds_ = {};
};

/// Adds the time spent in a scope to `part`.
class Timed {
 public:
  Timed(Profile& profile, Part part)
      : seconds_(profile[part]), start_(std::chrono::steady_clock::now()) {}
  ~Timed() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace gpt
