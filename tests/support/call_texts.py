"""Texts of tool calls in the notations of grammars, and which answers may be such a text."""

from __future__ import annotations

from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.output_parsers.tool_grammar import CallNotation

FIND, FIND_ALL = (
    '{"name": "find", "arguments": {"city": "Ulm"}}',
    '{"name": "find_all", "arguments": {"q": [1]}}',
)
WRONG = '{"name": "find", "arguments": {"n": 1}}'
TAGGED_FIND = "<function=find>\n<parameter=city>\nUlm\n</parameter>\n</function>"
TAGGED_ALL = '<function=find_all>\n<parameter=q>\nany "text"\n</parameter>\n</function>'
TAGGED_BOTH = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in (TAGGED_FIND, TAGGED_ALL))
LLAMA_FIND, LLAMA_ALL = (text.replace("arguments", "parameters") for text in (FIND, FIND_ALL))
NOTATIONS: dict[CallNotation, OutputParsers] = {
    "hermes": OutputParsers("hermes", "think"),
    "llama3": OutputParsers("llama3", "think"),
    "mistral": OutputParsers("mistral", "think"),
    "mistral_args": OutputParsers("mistral", "think", marks_arguments=True),
    "qwen3_coder": OutputParsers("qwen3_coder", "think"),
    "seed_oss": OutputParsers("seed_oss", "think"),
    "granite": OutputParsers("granite", "think"),
    "phi4": OutputParsers("phi4", "think"),
    "apertus": OutputParsers("apertus", "think"),
}
# Texts, and where they are complete: with calls "required", allowed in "text", and there with "one" at most.
TEXTS: dict[CallNotation, list[tuple[str, str]]] = {
    "hermes": [
        (f"<tool_call>\n{FIND}\n</tool_call>", "required text one"),
        (f"<tool_call>\n{FIND}\n</tool_call>\n<tool_call>\n{FIND_ALL}\n</tool_call>", "required text"),
        ("just text", "text one"),
        (f"I call <tool_call>{FIND_ALL}</tool_call>", "text one"),
        (f"I call <tool_call>{WRONG}</tool_call>", ""),
        (f"<tool_call>{FIND.replace('find', 'delete')}</tool_call>", ""),
        ("<tool_call>", ""),
        ("this <tool is no call", "text one"),
    ],
    "llama3": [
        (LLAMA_FIND, "required text one"),
        (f"{LLAMA_FIND}; {LLAMA_ALL}", "required text"),
        (f"<|python_tag|>{LLAMA_FIND}", "required text one"),
        ("text with { in it", "text one"),
        ('{"answer": 42}', ""),
        (f"  {LLAMA_FIND}", "text one"),
        (WRONG.replace("arguments", "parameters"), ""),
        ("<|python_tag|>print(1)", ""),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{FIND}]", "required text one"),
        (f"[TOOL_CALLS] [{FIND}, {FIND_ALL}]", "required text"),
        ("a list [x]", "text one"),
        (f"I call [TOOL_CALLS][{FIND}]", "text one"),
        (f"[TOOL_CALLS][{WRONG}]", ""),
        ("[TOOL_CALLS][]", ""),
    ],
    "mistral_args": [
        ('[TOOL_CALLS]find[ARGS]{"city": "Ulm"}', "required text one"),
        (
            '[TOOL_CALLS]find[CALL_ID]abcdefgh1[ARGS]{"city": "Ulm"}[TOOL_CALLS]find_all[ARGS]{}',
            "required text",
        ),
        ("a list [x]", "text one"),
        ("I call [TOOL_CALLS]find_all[ARGS]{}", "text one"),
        ("[TOOL_CALLS]find[ARGS]{}", ""),
    ],
    "qwen3_coder": [
        (f"<tool_call>\n{TAGGED_FIND}\n</tool_call>", "required text one"),
        (
            f"<tool_call>\n{TAGGED_FIND}\n</tool_call>\n<tool_call>\n{TAGGED_ALL}\n</tool_call>",
            "required text",
        ),
        ("just text", "text one"),
        (f"I call <tool_call>\n{TAGGED_ALL}\n</tool_call>", "text one"),
        (f"<tool_call>\n{TAGGED_FIND.replace('Ulm', 'Rome')}\n</tool_call>", ""),
        (f"<tool_call>\n{FIND}\n</tool_call>", ""),
        ("<tool_call>\n<function=find>\n</function>\n</tool_call>", ""),
        ("<tool_call>\n<function=find_all>\n</function>\n</tool_call>", "required text one"),
    ],
    "seed_oss": [
        (f"<seed:tool_call>\n{TAGGED_FIND}\n</seed:tool_call>", "required text one"),
        (f"I call <seed:tool_call>\n{TAGGED_ALL}\n</seed:tool_call>", "text one"),
        (f"<seed:tool_call>\n{TAGGED_FIND}\n</tool_call>", ""),
        ("this <seed:tool is no call", "text one"),
    ],
    "granite": [
        (f"<|tool_call|>[{FIND}]", "required text one"),
        (f"<|tool_call|>[{FIND}, {FIND_ALL}]", "required text"),
        (f"I call <|tool_call|>[{FIND}]", "text one"),
        (f"<|tool_call|>[{WRONG}]", ""),
        ("<|tool_call|>so", ""),
    ],
    "phi4": [
        (f"<|tool_call|>[{FIND}]<|/tool_call|>", "required text one"),
        (f"<|tool_call|>[{FIND}, {FIND_ALL}]<|/tool_call|>", "required text"),
        (f"I call <|tool_call|>[{FIND}]<|/tool_call|>", "text one"),
        (f"<|tool_call|>[{FIND}]", ""),
        (f"<|tool_call|>[{WRONG}]<|/tool_call|>", ""),
    ],
    "apertus": [
        ('<|tools_prefix|>[{"find": {"city": "Ulm"}}]<|tools_suffix|>', "required text one"),
        (
            '<|tools_prefix|>[{"find": {"city": "Ulm"}}, {"find_all": {"q": [1]}}]<|tools_suffix|>',
            "required text",
        ),
        ('I call <|tools_prefix|>[{"find": {"city": "Ulm"}}]<|tools_suffix|>', "text one"),
        ('<|tools_prefix|>[{"find": {"n": 1}}]<|tools_suffix|>', ""),
        ('<|tools_prefix|>[{"delete": {"city": "Ulm"}}]<|tools_suffix|>', ""),
    ],
}
