// The CPU kernels: `workers/model/native` compiles this file for an instruction set and binds its functions;
// without a compiler the torch code beside each call does the same.
//
// Elements are float or bfloat16 (kept as uint16_t); arithmetic is float. Rounding follows the torch code:
// a bfloat16 intermediate is rounded wherever torch would store one.

#include "causal_conv.h"
#include "decoder_layer.h"
#include "delta_rule.h"
#include "gate.h"
#include "head_products.h"
#include "integer_products.h"
#include "mamba2.h"
#include "mixture.h"
#include "quantized_products.h"
#include "scaled_heads.h"
#include "sampling.h"

// Called once before all others. Returns whether the operating system lets this process use the instruction set.
extern "C" int64_t tandem_initialize() { return permit_tiles(); }
