#pragma once
// Prints an analysis as text and as JSON.

#include <string>

#include "train/analyze.h"

namespace train {

/// Tables for the terminal: which grouping the criterion favours, and which one was actually best.
std::string to_text(const CheckpointAnalysis& analysis);

/// All results, for other programs.
std::string to_json(const CheckpointAnalysis& analysis);

}  // namespace train
