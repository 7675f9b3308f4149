#include "gpt/kernels.h"

#include <c10/util/Exception.h>

namespace gpt {
namespace {

[[noreturn]] void refuse(Engine engine) {
  TORCH_CHECK(false, "engine ", group_muon::to_string(engine), " has no such kernels");
}

}  // namespace

#define GPT_RETURN(target, its_engine) \
  if (engine == group_muon::its_engine) return target::GPT_TABLE;
#define GPT_DEFINE(T, function, Table, targets) \
  template <>                                   \
  const Table<T>& function<T>(Engine engine) {  \
    targets(GPT_RETURN) refuse(engine);         \
  }

#define GPT_TABLE kFloatKernels
GPT_DEFINE(float, kernels_of, Kernels, GROUP_MUON_FOR_TARGETS)
#undef GPT_TABLE
#define GPT_TABLE kFloatAttention
GPT_DEFINE(float, attention_of, AttentionKernels, GROUP_MUON_FOR_TARGETS)
#undef GPT_TABLE
#define GPT_TABLE kDoubleKernels
GPT_DEFINE(double, kernels_of, Kernels, GROUP_MUON_FOR_TARGETS)
#undef GPT_TABLE
#define GPT_TABLE kDoubleAttention
GPT_DEFINE(double, attention_of, AttentionKernels, GROUP_MUON_FOR_TARGETS)
#undef GPT_TABLE
#define GPT_TABLE kBf16Kernels
GPT_DEFINE(c10::BFloat16, kernels_of, Kernels, GROUP_MUON_FOR_BF16_TARGETS)
#undef GPT_TABLE
#define GPT_TABLE kBf16Attention
GPT_DEFINE(c10::BFloat16, attention_of, AttentionKernels, GROUP_MUON_FOR_BF16_TARGETS)
#undef GPT_TABLE

}  // namespace gpt
