"""The kernels of experts as the compiler makes them for Hopper and for Ampere, which needs no device."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

Named = dict[str, list[dict[str, Any]]]
HOPPER, AMPERE = 90, 80
# The launches that `compile_experts.py` compiles for.
FEW, MANY, FEW_WITH_BIAS, MANY_FLOATS = range(4)


@pytest.fixture(scope="module", params=[HOPPER, AMPERE], ids=["hopper", "ampere"])
def capability(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def kernels(capability: int, tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Return the kernels of each name."""
    from hopper_compiler import compile_by_script

    named = collections.defaultdict(list)
    script = Path(__file__).parent / "compile_experts.py"
    for kernel in compile_by_script(script, tmp_path_factory.mktemp("triton"), str(capability)):
        named[kernel["name"]].append(kernel)
    return named


def test_every_kernel_compiles_and_spills_no_register(kernels: Named) -> None:
    assert {name: len(made) for name, made in kernels.items()} == {
        "_sort_kernel": 4,
        "_gate_up_kernel": 4,
        "_down_kernel": 4,
        "_add_kernel": 4,
        "_activate_kernel": 1,
        "_choose_kernel": 2,
    }
    assert [it for made in kernels.values() for it in made if it["stack_bytes"]] == []


@pytest.mark.parametrize("name", ["_gate_up_kernel", "_down_kernel"])
def test_programs_of_few_rows_share_a_multiprocessor(kernels: Named, name: str) -> None:
    """Each has 48 KiB of weights on their way, and 36 KiB a multiprocessor cover a latency of 1 us on an
    H100. Ampere has 164 KiB of shared memory for two."""
    for case in (FEW, FEW_WITH_BIAS):
        kernel = kernels[name][case]
        assert kernel["num_copies"] > 0
        assert kernel["num_warp_products"] > 0
        assert 48 << 10 <= kernel["shared_bytes"] <= 80 << 10
        assert kernel["programs"] >= 2


@pytest.mark.parametrize("name", ["_gate_up_kernel", "_down_kernel"])
def test_products_of_many_rows_use_warpgroups_where_there_are_any(
    kernels: Named, name: str, capability: int
) -> None:
    kernel = kernels[name][MANY]
    assert kernel["num_copies"] > 0
    assert kernel["num_group_products" if capability >= HOPPER else "num_warp_products"] > 0
    assert kernel["programs"] >= (3 if capability >= HOPPER else 2)
    assert kernels[name][MANY_FLOATS]["programs"] >= 4


def test_the_choice_of_a_token_takes_one_warp(kernels: Named) -> None:
    for kernel in kernels["_choose_kernel"]:
        assert kernel["num_warps"] == 1
        assert kernel["shared_bytes"] <= 1 << 10
