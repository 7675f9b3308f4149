#pragma once
// An analysis in words and numbers.

#include <string>

#include "train/analyze.h"

namespace train {

/// The tables that are printed: which grouping the criterion favours, which one was really best.
std::string to_text(const CheckpointAnalysis& analysis);

/// Everything, for other programs to read.
std::string to_json(const CheckpointAnalysis& analysis);

}  // namespace train
