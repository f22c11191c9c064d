"""Every family against `transformers`, on random checkpoints that `transformers` itself writes: three shapes
each, whose sizes divide by little."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from optional_programs import needs_compiler, uses_compiler
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of

from workers.model.decoder import load_decoder
from workers.model.families.known_families import FAMILIES, NAME_TO_FAMILY

pytestmark = uses_compiler

CPU = torch.device("cpu")
Endings = tuple[str, ...]
PROMPT_TOKENS = 70


def _on_both(cases: Iterable[str], *, fast_by_kernels: Endings, fast_by_torch: Endings) -> list[Any]:
    """Return the cases by the kernels and by torch. Those that end otherwise are slow."""
    by_both = [("kernels", fast_by_kernels, [needs_compiler]), ("torch", fast_by_torch, [])]
    return [
        pytest.param(case, name, marks=[*marks, *([] if case.endswith(fast) else [pytest.mark.slow])])
        for name, fast, marks in by_both
        for case in cases
    ]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("case", "backend"),
    # Each family by both, with another of its shapes.
    _on_both(CASES, fast_by_kernels=("-1", "-4"), fast_by_torch=("-3",)),
    indirect=["backend"],
)
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES[case])
    prompt = tokens_of(1, PROMPT_TOKENS)
    model = PagedModel(load_decoder(tmp_path, torch.float32, CPU), torch.float32)
    output = model.greedy(0, prompt, 40)
    expected = reference_logits(reference_of(tmp_path), prompt + output[:-1])
    assert expected.std() >= 0.5
    assert output == expected[PROMPT_TOKENS - 1 :].argmax(-1).tolist()
    for sequence, chunk_tokens in enumerate((7, PROMPT_TOKENS), 1):
        chunked = model.chunked(sequence, prompt, chunk_tokens)
        assert error_of(chunked, expected[:PROMPT_TOKENS]) <= 1e-4


# Of families with experts the shape in which tokens choose all: a choice that rounding changes would change
# the logits more than anything else does.
_ROUNDED = [
    case
    for case in CASES
    # Phi-3.5-MoE weighs two experts by which of them comes first, and rounding changes that. What the gated
    # delta rule gives a token may be small before its norm (`test_delta_models` compares most tokens).
    if CASES[case]["family"] not in ("phimoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    and case.endswith("-1" if NAME_TO_FAMILY[CASES[case]["family"]].experts is None else ("-3", "-6"))
]


# Where layers round: norms before, after and of rows, caps, gates, scales, latents, experts and states.
_FAST_ROUNDED = (
    *("llama-1", "gemma2-1", "gemma3_text-1", "granite-1", "olmo2-1", "cohere2-1", "apertus-1"),
    *("gpt_oss-3", "qwen3_moe-3", "deepseek_v3-3", "lfm2-1"),
)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("case", "backend"),
    _on_both(_ROUNDED, fast_by_kernels=_FAST_ROUNDED, fast_by_torch=("llama-1",)),
    indirect=["backend"],
)
def test_bfloat16_is_as_close_to_float32_as_transformers(case: str, tmp_path: Path) -> None:
    """The error of rounding activations may be 1.5 times transformers' own."""
    write_family_checkpoint(tmp_path, **(CASES[case] | {"dtype": "bfloat16"}))
    prompt = tokens_of(2, PROMPT_TOKENS)
    exact = reference_logits(reference_of(tmp_path), prompt)
    allowed = 1.5 * error_of(reference_logits(reference_of(tmp_path, torch.bfloat16), prompt), exact)
    assert 1e-4 < allowed < 0.2
    model = PagedModel(load_decoder(tmp_path, torch.bfloat16, CPU), torch.bfloat16)
    for sequence, chunk_tokens in enumerate((1, 40, PROMPT_TOKENS)):
        assert error_of(model.chunked(sequence, prompt, chunk_tokens), exact) <= allowed


def test_every_family_has_three_shapes() -> None:
    shapes: dict[Any, int] = {}
    for case in CASES.values():
        shapes[case["family"]] = shapes.get(case["family"], 0) + 1
    assert {family.name for family in FAMILIES} == shapes.keys()
    assert set(shapes.values()) == {3, 6}
