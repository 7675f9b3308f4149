#pragma once
// A study as a Slurm array job: a task a run, addressed by its place in the plan.

#include <string>
#include <vector>

#include "study/workers.h"

namespace study {

/// "0-3,7,9-10"
std::string ranges_of(const std::vector<int64_t>& numbers);

/// The batch script for all runs that are not finished; `options` are more of sbatch's, such as "--time=2:00:00". At
/// most `at_once` tasks run at a time; 0: as many as Slurm sees fit.
std::string slurm_script(
    const Folder& folder, const Workers& workers, int64_t at_once, const std::string& program,
    const std::string& options);

/// Gives a script to sbatch; returns what that says, such as "Submitted batch job 12".
std::string submit(const std::string& script);

}  // namespace study
