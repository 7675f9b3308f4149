#pragma once
// Everything a user of the library needs.

#include "group_muon/assemble.h"       // IWYU pragma: export
#include "group_muon/diagnostics.h"    // IWYU pragma: export
#include "group_muon/layout.h"         // IWYU pragma: export
#include "group_muon/optimizer.h"      // IWYU pragma: export
#include "group_muon/orthogonalize.h"  // IWYU pragma: export
