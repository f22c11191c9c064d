"""The datasets of the serving benchmark: what is read of files, and what is drawn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.api.generate_options import Turn
from cluster.bench.conversations import read_conversations
from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.datasets import Dataset, open_dataset, parse_dataset
from cluster.bench.json_items import MAX_LINE_BYTES, json_items
from cluster.bench.lengths_dataset import drawn_lengths
from cluster.bench.request_lengths import read_lengths
from cluster.bench.trace_file import TraceRequest, read_trace, write_trace
from cluster.errors import BenchError

RUN = RunSettings(rate_per_s=0.0, seed=1, vocab_size=500, context_tokens=0)


def opened(text: str, run: RunSettings = RUN, **settings: Any) -> Load:
    return open_dataset(parse_dataset(text), DatasetSettings(**settings))(run)


def first_prompts(load: Load) -> list[list[int]]:
    """What the first turn of each session says."""
    news = [session.turns[0].new() for session in load.sessions]
    return [[token for token in new if isinstance(token, int)] for new in news]


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("sharegpt:a:b.json", Dataset("sharegpt", "a:b.json")),
        ("mooncake:trace.jsonl", Dataset("mooncake", "trace.jsonl")),
        ("sessions", Dataset("sessions")),
        ("lengths:uniform", Dataset("lengths", "uniform")),
    ],
)
def test_datasets_are_named(text: str, dataset: Dataset) -> None:
    assert parse_dataset(text) == dataset


@pytest.mark.parametrize("text", ["", "sharegpt", "sharegpt:", "sessions:4", "lengths", "alpaca:x", ":x"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected sharegpt:FILE, mooncake:FILE, sessions, or lengths:KIND"):
        parse_dataset(text)


# ------------------------------------------------------------------------------------ conversations


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


CONVERSATIONS: list[dict[str, Any]] = [
    {"id": "a", "conversations": [human("one [ {"), gpt('two "} \\'), human("three"), gpt("four" * 10)]},
    {"id": "no answer", "conversations": [human("hello")]},
    {"messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "q"},
                  {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [gpt("lost beginning"), human("x"), gpt("y"), human("z"), human("z")]},
]  # fmt: skip


@pytest.mark.parametrize("style", ["lines", "array", "indented"])
def test_both_styles_of_conversations_are_read(tmp_path: Path, style: str) -> None:
    file = tmp_path / "conversations"
    lines = "\n".join(map(json.dumps, CONVERSATIONS)) + "\n\n"
    indent = 2 if style == "indented" else None
    file.write_text(lines if style == "lines" else json.dumps(CONVERSATIONS, indent=indent))
    read = [[(exchange.asked, exchange.answer) for exchange in each] for each in read_conversations(file)]
    assert read == [
        [([Turn("user", "one [ {")], 'two "} \\'), ([Turn("user", "three")], "four" * 10)],
        [([Turn("system", "brief"), Turn("user", "q")], "a")],
        [([Turn("user", "x")], "y")],
    ]


def test_a_conversation_s_turns_have_the_recorded_answers_before_them(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    load = opened(f"sharegpt:{file}")
    first = load.sessions[0]
    assert [list(turn.new()) for turn in first.turns] == [
        [Turn("user", "one [ {")],
        [Turn("assistant", 'two "} \\'), Turn("user", "three")],
    ]
    assert [turn.output_tokens for turn in first.turns] == [2, 10]
    assert first.stand_in is None
    assert (len(load.sessions), load.num_requests) == (3, 4)
    capped = opened(f"sharegpt:{file}", num_requests=2, output_tokens=4)
    assert [[turn.output_tokens for turn in session.turns] for session in capped.sessions] == [[2, 4]]
    short = opened(f"sharegpt:{file}", RUN._replace(context_tokens=8))
    assert (short.num_requests, short.num_left_out) == (3, 1)


def test_the_runs_of_a_sweep_read_on(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    make = open_dataset(parse_dataset(f"sharegpt:{file}"), DatasetSettings(num_requests=2))
    asked = [[list(session.turns[0].new())[-1] for session in make(RUN).sessions] for _ in range(2)]
    assert asked == [[Turn("user", "one [ {")], [Turn("user", "q"), Turn("user", "x")]]
    with pytest.raises(BenchError, match="no conversation for this run"):
        make(RUN)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"conversations": []}\nnonsense\n', "line 2: JSON is malformed"),
        ('{"conversations": [{"from": "human", "value": 7}]}', "line 1: Expected `str`, got `int`"),
        ('\n{"conversations": [{"from": "robot", "value": "x"}]}', "line 2: a message is from 'robot'"),
        ('[\n{"conversations": []},\n{"conversations": 1}]', "line 3: Expected `array`"),
        ('[{"conversations": []},\n 7]', "line 2: expected an object"),
        ('[{"conversations": []},\n{"conv', "line 2: the array does not end"),
    ],
)
def test_a_bad_conversation_is_named_by_its_line(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "bad"
    file.write_text(text)
    with pytest.raises(BenchError) as raised:
        list(read_conversations(file))
    assert error in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for kind in ("sharegpt", "mooncake", "lengths"):
        with pytest.raises(BenchError, match=r"cannot read .*none"):
            opened(f"{kind}:{tmp_path / 'none'}")


def test_a_line_without_an_end_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "endless"
    for start in (b"{", b'[{"a":"'):
        file.write_bytes(start + b"x" * (MAX_LINE_BYTES + 2))
        with pytest.raises(BenchError, match=r"line 1: .* longer than"):
            list(json_items(file))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(), _VALUES, max_size=4), max_size=5),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
@example([{'\\"': '\\\\"]}'}], 1, None, False)
def test_an_array_is_cut_as_a_parser_would(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, Any]],
    chunk_bytes: int,
    indent: int | None,
    ascii_only: bool,
) -> None:
    file = tmp_path_factory.mktemp("array") / "items"
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only) if items else " [ ]\n"
    file.write_bytes(text.encode(errors="surrogatepass"))
    cut = list(json_items(file, chunk_bytes))
    assert [json.loads(item) for _, item in cut] == items
    lines = text.split("\n")
    assert all(lines[number - 1].strip()[:1] in ("{", "[") for number, _ in cut)


# ------------------------------------------------------------------------------------------- traces


def trace(folder: Path, *lines: dict[str, Any]) -> str:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return f"mooncake:{file}"


def request(at_ms: float, num_input: int, num_output: int, *blocks: int) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": num_input, "output_length": num_output, "hash_ids": blocks}


def test_equal_hash_ids_give_equal_blocks(tmp_path: Path) -> None:
    load = opened(
        trace(
            tmp_path,
            request(5000, 1200, 7, 0, 1, 2),
            request(5500, 1024, 0, 0, 1),
            request(7000, 600, 3, 0, 9),
            request(7000, 512, 3, 1 << 70),
        ),
        time_scale=0.5,
    )
    a, b, c, d = first_prompts(load)
    assert [len(prompt) for prompt in (a, b, c, d)] == [1200, 1024, 600, 512]
    assert a[:1024] == b
    assert c[:512] == a[:512] != d
    assert c[512:] not in (a[512:600], a[1024:1112])
    assert [session.arrival_s for session in load.sessions] == [0.0, 0.25, 1.0, 1.0]
    assert [session.turns[0].output_tokens for session in load.sessions] == [7, 1, 3, 3]
    assert all(0 <= token < 500 for token in a)


def test_blocks_have_the_size_that_a_trace_names(tmp_path: Path) -> None:
    lines = [request(0, 40, 1, 1, 2, 3), request(0, 32, 1, 1, 2)]
    a, b = first_prompts(opened(trace(tmp_path, *({**line, "block_tokens": 16} for line in lines))))
    assert (len(a), a[:32]) == (40, b)
    assert a[:16] != a[16:32]


def test_a_written_trace_is_read_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "written.jsonl"
    requests = [
        TraceRequest(0.0, 40, 7, (1, 2, 3), 16, "acme", "batch"),
        TraceRequest(1.25, 16, 0, (1,), 16),
    ]
    assert write_trace(file, requests) == 2
    assert list(read_trace(file)) == requests
    with pytest.raises(BenchError, match=r"cannot write .*: No such file or directory"):
        write_trace(tmp_path / "absent" / "written.jsonl", requests)


def test_what_does_not_fit_into_the_context_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = [request(at, size, 100, 1, 2, 3) for at, size in enumerate((400, 1400, 900, 300))]
    load = opened(trace(tmp_path, *lines), RUN._replace(context_tokens=1000), num_requests=3)
    assert ([len(it) for it in first_prompts(load)], load.num_left_out) == ([400, 900, 300], 1)
    with pytest.raises(BenchError, match="no request that fits"):
        opened(trace(tmp_path, *lines), RUN._replace(context_tokens=100))


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (request(0, 1025, 1, 1, 2), "line 2: input_length 1025 needs 3 hash_ids, not 2"),
        (request(-1, 1, 1, 1), "line 2: Expected `float` >= 0"),
        (request(0, 0, 1), "line 2: Expected `int` >= 1"),
        (request(0, 1 << 60, 1, 1), "line 2: Expected `int` <= 16777216"),
        ({"timestamp": 1}, "line 2: Object missing required field `input_length`"),
        (
            {**request(0, 10, 1, 1), "block_tokens": 64},
            "line 2: block_tokens is 64, and 512 in the line before; split the trace by the size",
        ),
        ({**request(0, 10, 1, 1), "block_tokens": 0}, "line 2: Expected `int` >= 1"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: dict[str, Any], error: str) -> None:
    with pytest.raises(BenchError) as raised:
        opened(trace(tmp_path, request(0, 10, 1, 1), line))
    assert error in str(raised.value)


def test_no_more_of_a_trace_is_read_than_wanted(tmp_path: Path) -> None:
    dataset = trace(tmp_path, request(0, 10, 1, 1), {"nonsense": 1})
    assert opened(dataset, num_requests=1).num_requests == 1


# ------------------------------------------------------------------------------------------ sessions


def test_sessions_share_their_group_s_system_prompt() -> None:
    load = opened(
        "sessions",
        RUN._replace(rate_per_s=10.0),
        num_sessions=4,
        num_turns=3,
        input_tokens=20,
        output_tokens=5,
        shared_prefix_tokens=30,
        num_groups=2,
        think_s=1.0,
    )
    assert load.num_requests == 12
    prompts = first_prompts(load)
    assert {len(prompt) for prompt in prompts} == {50}
    assert prompts[0][:30] == prompts[2][:30] != prompts[1][:30]
    assert prompts[0][30:] != prompts[2][30:]
    turns = load.sessions[0].turns
    assert [len(list(turn.new())) for turn in turns] == [50, 20, 20]
    assert turns[0].think_s == 0.0
    assert all(turn.think_s > 0 for turn in turns[1:])
    arrivals = [session.arrival_s for session in load.sessions]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0 < arrivals[1]
    stand_in = load.sessions[0].stand_in
    assert stand_in is not None
    assert len(stand_in(5)) == 5


def test_sessions_that_outgrow_the_context_are_refused_with_the_remedy() -> None:
    with pytest.raises(BenchError, match=r"up to 288 tokens, the model's context 200: lower --turns, "):
        opened("sessions", RUN._replace(context_tokens=200), num_turns=2, input_tokens=112)


# ------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("kind", ["fixed", "uniform", "lognormal"])
def test_drawn_lengths_have_their_mean(kind: str) -> None:
    settings = DatasetSettings(num_requests=4000, input_tokens=200, output_tokens=40, length_spread=0.4)
    lengths = drawn_lengths(kind, settings, seed=3)
    for values, mean in (([it.input for it in lengths], 200), ([it.output for it in lengths], 40)):
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
        spread = {"fixed": 0.0, "uniform": 0.4 / 3**0.5, "lognormal": 0.4165}[kind]
        assert statistics.pstdev(values) / mean == pytest.approx(spread, abs=0.03)
    if kind == "uniform":
        assert min(it.input for it in lengths) >= 120
        assert max(it.input for it in lengths) <= 280


def test_lengths_are_never_below_one() -> None:
    settings = DatasetSettings(num_requests=500, input_tokens=1, output_tokens=1, length_spread=3.0)
    for kind in ("uniform", "lognormal"):
        assert min(min(it) for it in drawn_lengths(kind, settings, seed=3)) == 1


def test_prompts_of_drawn_lengths_share_their_group_s_prefix() -> None:
    load = opened(
        "lengths:uniform", RUN._replace(context_tokens=300), num_requests=50, shared_prefix_tokens=150
    )
    prompts = first_prompts(load)
    assert load.num_left_out > 0
    assert len(prompts) + load.num_left_out == 50
    longest = max(prompts, key=len)
    assert all(prompt[:150] == longest[: min(150, len(prompt))] for prompt in prompts)


def lengths_file(folder: Path, text: str) -> Path:
    file = folder / "lengths.csv"
    file.write_text(text)
    return file


def test_lengths_of_a_file_are_repeated(tmp_path: Path) -> None:
    file = lengths_file(tmp_path, "input,output\n10,2\n\n 20 , 3 ,ignored\n")
    load = opened(f"lengths:{file}", num_requests=5)
    assert [len(prompt) for prompt in first_prompts(load)] == [10, 20, 10, 20, 10]
    assert [session.turns[0].output_tokens for session in load.sessions] == [2, 3, 2, 3, 2]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1,2\n3\n", "line 2: expected INPUT,OUTPUT, not '3'"),
        ("1,2\nx,4\n", "line 2: expected INPUT,OUTPUT, not 'x,4'"),
        ("0,4\n", "line 1: lengths are from 1 to"),
        ("input,output\n", "has no lengths"),
    ],
)
def test_a_bad_line_of_lengths_is_named(tmp_path: Path, text: str, error: str) -> None:
    file = lengths_file(tmp_path, text)
    with pytest.raises(BenchError) as raised:
        opened(f"lengths:{file}", num_requests=3)
    assert error in str(raised.value)


def test_a_table_without_a_heading_is_read_from_its_first_line(tmp_path: Path) -> None:
    lengths: Sequence[tuple[int, int]] = list(read_lengths(lengths_file(tmp_path, "1,2\n3,4")))
    assert lengths == [(1, 2), (3, 4)]
