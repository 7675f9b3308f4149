#include "gpt/kernels.h"

#include <c10/util/Exception.h>

namespace gpt {

GROUP_MUON_DEFINE_LOOKUP(GROUP_MUON_FOR_TARGETS, kernels_of, kFloatKernels, Kernels<float>)
GROUP_MUON_DEFINE_LOOKUP(GROUP_MUON_FOR_TARGETS, kernels_of, kDoubleKernels, Kernels<double>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, kernels_of, kBf16Kernels, Kernels<c10::BFloat16>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_TARGETS, attention_of, kFloatAttention, AttentionKernels<float>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_TARGETS, attention_of, kDoubleAttention, AttentionKernels<double>)
GROUP_MUON_DEFINE_LOOKUP(
    GROUP_MUON_FOR_BF16_TARGETS, attention_of, kBf16Attention, AttentionKernels<c10::BFloat16>)

}  // namespace gpt
