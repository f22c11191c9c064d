"""langchain-openai against a gateway, and LangGraph's loop that calls tools until it can answer."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

GUARDED: dict[str, Any] = json.loads(os.environ["TANDEM_GUARDED"])
SERVER: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "model": "m", "max_retries": 0}
HELLO = "Hello there, my friend."
BOTH = "the weather in both cities?"
asked_for: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked_for.append(city)
    return "sunny"


def chats(model: Any) -> None:
    done = model.invoke("hello")
    assert done.text == HELLO
    assert done.usage_metadata["output_tokens"] > 0
    whole = None
    for chunk in model.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.text == HELLO
    assert whole.usage_metadata["output_tokens"] > 0
    assert [each.text for each in model.batch(["hello", "you"])] == [HELLO] * 2


def parsing(model: Any) -> None:
    for method in ("json_schema", "json_mode"):
        structured = model.with_structured_output(Person, method=method)
        assert structured.invoke("a person") == Person(name="Ada", age=36)


def tools(model: Any) -> None:
    for choice in ("auto", "any", "get_weather"):
        bound = model.bind_tools([get_weather], tool_choice=choice)
        (call,) = bound.invoke("how is the weather?").tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    whole = None
    for chunk in model.bind_tools([get_weather]).stream(BOTH):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]


def tool_loop(model: Any) -> Any:
    """LangGraph's, as its documentation has it."""
    bound = model.bind_tools([get_weather])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def loops(model: Any) -> None:
    for streams in (False, True):
        asked_for.clear()
        loop, asked = tool_loop(model), {"messages": [("user", BOTH)]}
        if streams:
            parts = [part for part, _ in loop.stream(asked, stream_mode="messages")]
            assert "".join(part.text for part in parts if part.type == "AIMessageChunk") == "It is sunny."
        else:
            assert loop.invoke(asked)["messages"][-1].text == "It is sunny."
        assert sorted(asked_for) == ["Paris", "Rome"]


def others() -> None:
    embedder = OpenAIEmbeddings(
        base_url=sys.argv[1], api_key="none", model="m", check_embedding_ctx_length=False
    )
    assert [len(vector) for vector in embedder.embed_documents(["hello", "you"])] == [8, 8]
    assert OpenAI(**SERVER).invoke("hello") == HELLO
    scored = ChatOpenAI(**SERVER, logprobs=True, top_logprobs=1).invoke("hello")
    assert scored.response_metadata["logprobs"]["content"]
    assert ChatOpenAI(**SERVER, stop=["friend"]).invoke("hello").text == "Hello there, my "
    thought = ChatOpenAI(**SERVER).invoke("think")
    assert thought.text.strip() == "Four."


def errors() -> None:
    keys = GUARDED["keys"]
    guarded = {**SERVER, "base_url": GUARDED["url"]}
    for changes, kind in (
        ({"api_key": "nonsense"}, openai.AuthenticationError),
        ({"api_key": keys["elsewhere"]}, openai.NotFoundError),
        ({"api_key": keys["hasty"]}, openai.RateLimitError),
        ({"api_key": keys["acme"], "temperature": -1}, openai.BadRequestError),
    ):
        refused = None
        try:
            for _ in range(5):
                ChatOpenAI(**{**guarded, **changes}).invoke("hello")
        except kind as error:
            refused = error
        assert refused is not None, kind
    patient = ChatOpenAI(**{**guarded, "api_key": keys["hasty"], "max_retries": 4})
    assert [each.text for each in patient.batch(["hello"] * 2)] == [HELLO] * 2


async def with_asyncio(model: Any) -> None:
    assert [each.text for each in await model.abatch(["hello"] * 4)] == [HELLO] * 4
    parts = [part.text async for part in model.astream("hello")]
    assert "".join(parts) == HELLO
    slow = model.bind(extra_headers={"X-Request-Id": "closed-langchain"}).astream("slow")
    assert await anext(slow) is not None
    await slow.aclose()


def main() -> None:
    for name in ("langchain-openai", "langgraph"):
        print(f"{name} {importlib.metadata.version(name)}")
    for model in (ChatOpenAI(**SERVER, stream_usage=True), ChatOpenAI(**SERVER, use_responses_api=True)):
        for part in (chats, parsing, tools, loops):
            part(model)
            print(f"{part.__name__}, {'responses' if model.use_responses_api else 'chats'}: well")
    others()
    errors()
    asyncio.run(with_asyncio(ChatOpenAI(**SERVER)))


if __name__ == "__main__":
    main()
