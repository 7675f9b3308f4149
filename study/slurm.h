#pragma once
// A study as a Slurm array job, a task a run.

#include <string>

#include "study/workers.h"

namespace study {

/// The batch script for all runs that are not finished, and with `retry` those that have failed; `options` are more of
/// sbatch's, such as "--time=2:00:00". At most `workers.jobs` tasks run at a time; 0: as many as Slurm sees fit. Runs stand in
/// it by name, so that a study that grows meanwhile does no harm.
std::string slurm_script(
    const Folder& folder, const Workers& workers, bool retry, const std::string& program,
    const std::string& options);

/// Gives a script to sbatch; returns what that says, such as "Submitted batch job 12".
std::string submit(const std::string& script);

}  // namespace study
