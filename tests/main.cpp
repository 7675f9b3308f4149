// Runs the suites. GROUP_MUON_CPU names the engine under test. If this CPU does not have it, the exit code is 77,
// which ctest reports as skipped.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "group_muon/engine.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* wanted = std::getenv("GROUP_MUON_CPU");
  if (wanted != nullptr && !group_muon::runs_here(group_muon::parse_engine(wanted))) {
    std::printf("this CPU has no %s\n", wanted);
    return 77;
  }
  return RUN_ALL_TESTS();
}
