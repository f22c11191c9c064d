"""The sums of products with quantized weights in Triton, which the kernels of linear products and of experts
share: codes are decoded in registers, and multiplied by scales where that costs least."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.cuda.weight_codes import decoded, loaded_codes


@triton.jit
def _halves(words, place, FACTORS: tl.constexpr):
    """Return the factors at this place of words, 0 or 1, in float32."""
    bits = (words >> (place * 16)) & 0xFFFF
    if FACTORS == "bfloat16":
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(FACTORS == "float16")
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors_at(factors, groups, own, is_there, FACTORS: tl.constexpr):
    """Return the factors of the groups `own` of outputs, float32, where `groups` counts those before an
    output's. Factors of 16 bits lie two in a word, and no output's begin within a word: copies of less than
    a word would not be made ahead."""
    if FACTORS == "float32":
        return tl.load(factors + groups + own, mask=is_there, other=0.0)
    else:
        words = tl.load(factors + groups // 2 + own // 2, mask=is_there, other=0)
        return _halves(words, own % 2, FACTORS)


@triton.jit
def _group_factors(
    factors, groups, first, num_inputs, is_output, FACTORS: tl.constexpr, GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the scales or offsets of the inputs of a tile, float32 [num_outputs, INPUTS] or [num_outputs,
    1]."""
    if GROUP % INPUTS == 0:
        return factors_at(factors, groups, first // GROUP, is_output, FACTORS)
    elif INPUTS % GROUP == 0:
        if FACTORS == "float32":
            own = first + tl.arange(0, INPUTS // GROUP)[None, :] * GROUP
            found = factors_at(factors, groups, own // GROUP, is_output & (own < num_inputs), FACTORS)
        else:
            own = first + tl.arange(0, INPUTS // GROUP // 2)[None, :] * (2 * GROUP)
            places = factors + groups // 2 + own // (2 * GROUP)
            words = tl.load(places, mask=is_output & (own < num_inputs), other=0)
            found = tl.interleave(_halves(words, 0, FACTORS), _halves(words, 1, FACTORS))
        spread = tl.broadcast_to(found[:, :, None], (found.shape[0], INPUTS // GROUP, GROUP))
        return spread.reshape(found.shape[0], INPUTS)
    else:
        own = first + tl.arange(0, INPUTS)[None, :]
        return factors_at(factors, groups, own // GROUP, is_output & (own < num_inputs), FACTORS)


@triton.jit
def segment_sums(
    x_columns, packed_rows, scales, offsets, groups, is_row, is_output, segment, segment_inputs,
    num_inputs, row_bytes, CODES: tl.constexpr, SCALES: tl.constexpr, SCALING: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums over the inputs of a segment, float32 [OUTPUTS, ROWS].

    `x_columns` [1, ROWS] points to the rows' first inputs, `packed_rows` [OUTPUTS, 1] to the outputs' codes,
    and `groups` [OUTPUTS, 1] counts the groups before those of an output. Scales are of the dtype SCALES, as
    `factors_at` takes them, and offsets float32. So are scales of rows that are one group."""
    first = segment * segment_inputs
    end = tl.minimum(first + segment_inputs, num_inputs)
    dtype: tl.constexpr = x_columns.dtype.element_ty
    is_exact: tl.constexpr = dtype == tl.int8
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.int32 if is_exact and SCALING == "row" else tl.float32)
    input_sums = tl.zeros((ROWS,), dtype=tl.float32)
    inputs = tl.arange(0, INPUTS)[:, None]
    for start in tl.range(first, end, INPUTS, num_stages=STAGES):
        values = tl.load(x_columns + start + inputs, mask=is_row & (inputs < num_inputs - start), other=0)
        codes = loaded_codes(packed_rows, start, row_bytes, is_output, CODES, INPUTS)
        if is_exact:
            weights = codes.to(tl.int8, bitcast=True)
        else:
            wide = decoded(codes, CODES)
            if SCALING == "element":
                wide *= _group_factors(scales, groups, start, num_inputs, is_output, SCALES, GROUP, INPUTS)
                if offsets is not None:
                    wide += _group_factors(
                        offsets, groups, start, num_inputs, is_output, "float32", GROUP, INPUTS
                    )
            weights = wide.to(dtype)
        if SCALING == "tile":
            part = tl.dot(weights, values, input_precision=PRECISION).to(tl.float32)
            part *= _group_factors(scales, groups, start, num_inputs, is_output, SCALES, GROUP, INPUTS)
            if offsets is not None:
                of_tile = _group_factors(
                    offsets, groups, start, num_inputs, is_output, "float32", GROUP, INPUTS
                )
                part += of_tile * tl.sum(values.to(tl.float32), 0)[None, :]
            sums += part
        else:
            sums = tl.dot(weights, values, sums, input_precision=PRECISION, out_dtype=sums.dtype)
            if SCALING == "row" and offsets is not None:
                input_sums += tl.sum(values.to(tl.float32), 0)
    result = sums.to(tl.float32)
    if SCALING == "row":
        result *= tl.load(scales + groups, mask=is_output, other=0.0)
        if offsets is not None:
            result += tl.load(offsets + groups, mask=is_output, other=0.0) * input_sums[None, :]
    return result
