// Runs the suites. GROUP_MUON_CPU names the engine under test: what is to run on it ends with 77, which ctest takes for
// "skipped", where this CPU cannot.

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
