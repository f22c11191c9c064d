"""Phi-3 and Phi-4, also mini: Llama's shape in fused tensors."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "phi3",
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    ("Phi3ForCausalLM",),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    windows="all",
    rotary=Rotary(partial_factor=1.0),
    is_qkv_fused=True,
    is_gate_up_fused=True,
)
