"""A map in slices against a dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.common.sliced_map import SlicedMap

keys = st.integers(0, 40).map(lambda number: number.to_bytes(16, "big"))
operations = st.lists(
    st.tuples(st.sampled_from(["set", "set all", "pop", "discard", "some"]), st.lists(keys, max_size=8))
)


@given(operations, st.sampled_from([1, 4, 64]))
def test_it_is_a_dictionary(drawn: list[tuple[str, list[bytes]]], num_slices: int) -> None:
    made: SlicedMap[bytes, int] = SlicedMap(num_slices)
    model: dict[bytes, int] = {}
    for number, (name, named) in enumerate(drawn):
        if name == "set all":
            made.set_all(named, number)
            model |= dict.fromkeys(named, number)
        elif name == "set":
            for key in named:
                made[key] = model[key] = number
        elif name == "pop":
            assert [made.pop(key) for key in named] == [model.pop(key, None) for key in named]
        elif name == "discard":
            there = [key for key in dict.fromkeys(named) if key in model]
            assert made.discard_all(named) == there
            for key in there:
                del model[key]
        else:
            taken = made.pop_some(len(named))
            assert len(taken) == min(len(named), len(model))
            assert [model.pop(key) for key, _ in taken] == [value for _, value in taken]
        assert dict(made.items()) == model
        assert len(made) == len(model)
        assert bool(made) == bool(model)
        assert sorted(made) == sorted(key for index in range(num_slices) for key in made.slice(index))
        assert made.missing(named) == [key for key in named if key not in model]
        assert [made.get(key) for key in named] == [model.get(key) for key in named]
        assert sorted(made.values()) == sorted(model.values())
    made.clear()
    assert not made
