"""langchain-openai against a gateway, and LangGraph's loop that calls tools until it can answer."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

HELLO = "Hello there, my friend."
asked_for: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked_for.append(city)
    return "sunny"


def main() -> None:
    for name in ("langchain-openai", "langgraph"):
        print(f"{name} {importlib.metadata.version(name)}")
    server: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "model": "m", "max_retries": 0}
    model = ChatOpenAI(**server)
    assert model.invoke("hello").content == HELLO
    assert "".join(str(chunk.content) for chunk in model.stream("hello")) == HELLO
    assert model.with_structured_output(Person).invoke("a person") == Person(name="Ada", age=36)
    assert ChatOpenAI(**server, use_responses_api=True).invoke("hello").text == HELLO
    vectors = OpenAIEmbeddings(
        base_url=sys.argv[1], api_key="none", model="m", check_embedding_ctx_length=False
    ).embed_documents(["hello", "you"])
    assert [len(vector) for vector in vectors] == [8, 8]
    bound = model.bind_tools([get_weather])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    done = graph.compile().invoke({"messages": [("user", "the weather in both cities?")]})
    assert sorted(asked_for) == ["Paris", "Rome"]
    assert done["messages"][-1].content == "It is sunny."


if __name__ == "__main__":
    main()
