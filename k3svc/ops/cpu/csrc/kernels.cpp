// The kernels of one instruction set. Compiled once for each, with K3_ISA naming it.
#include "draft.h"
#include "kda.h"
#include "mla.h"
#include "moe.h"
#include "sampling.h"

namespace k3 {

#define K3_NAME(isa) kernels_##isa
#define K3_TABLE(isa) K3_NAME(isa)

extern const Kernels K3_TABLE(K3_ISA);
const Kernels K3_TABLE(K3_ISA) = {
    K3_ISA::linear,     K3_ISA::rms_norm,     K3_ISA::gated_norm, K3_ISA::mix_residual, K3_ISA::add_rows,
    K3_ISA::glu,        K3_ISA::sigmoid_gate, K3_ISA::route,      K3_ISA::experts,      K3_ISA::conv,
    K3_ISA::kda_extend, K3_ISA::kda_decode,   K3_ISA::mla_extend, K3_ISA::mla_decode,   K3_ISA::sample,
    K3_ISA::rotation,   K3_ISA::norm_rope,    K3_ISA::rotate,     K3_ISA::block_attention,
    K3_ISA::recur,      K3_ISA::confidences,  K3_ISA::choose,
};

}  // namespace k3
