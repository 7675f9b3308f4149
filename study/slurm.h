#pragma once
// A study as a Slurm array job with one task per run.

#include <string>

#include "study/workers.h"

namespace study {

/// The batch script for all unfinished runs, with `retry` also failed ones. `options` are additional sbatch options,
/// such as "--time=2:00:00". At most `workers.jobs` tasks run at a time; 0: no limit. The script lists runs by name,
/// so the study may grow in the meantime.
std::string slurm_script(
    const Folder& folder, const Workers& workers, const RunCommand& command, bool retry,
    const std::string& options);

/// Submits a script with sbatch and returns its output, such as "Submitted batch job 12".
std::string submit(const std::string& script);

}  // namespace study
