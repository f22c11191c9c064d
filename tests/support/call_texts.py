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
SEED_FIND = "<function=find>\n<parameter=city>Ulm</parameter>\n</function>"
SEED_ALL = '<function=find_all>\n<parameter=q>any "text"</parameter>\n</function>'
TAGGED_BOTH = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in (TAGGED_FIND, TAGGED_ALL))
LLAMA_FIND, LLAMA_ALL = (text.replace("arguments", "parameters") for text in (FIND, FIND_ALL))
GLM45_FIND = "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
GLM45_ALL = '<tool_call>find_all<arg_key>q</arg_key><arg_value>any "text"</arg_value></tool_call>'
GEMMA4_FIND = '<|tool_call>call:find{city:<|"|>Ulm<|"|>}<tool_call|>'
GEMMA4_ALL = '<|tool_call>call:find_all{q:[1,<|"|>any "text"<|"|>,{a:None}]}<tool_call|>'
COHERE2_FIND = '{"tool_call_id": "0", "tool_name": "find", "parameters": {"city": "Ulm"}}'
COHERE2_ALL = '{"tool_call_id": "1", "tool_name": "find_all", "parameters": {"q": [1]}}'
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
    "glm4": OutputParsers("glm4", "think"),
    "glm45": OutputParsers("glm45", "think"),
    "olmo3": OutputParsers("olmo3", "think"),
    "gemma3": OutputParsers("gemma3", "think"),
    "gemma4": OutputParsers("gemma4", "think"),
    "cohere2": OutputParsers("cohere2", "think"),
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
        (f"<seed:tool_call>\n{SEED_FIND}\n</seed:tool_call>", "required text one"),
        (f"I call <seed:tool_call>\n{SEED_ALL}\n</seed:tool_call>", "text one"),
        (f"<seed:tool_call>\n{SEED_FIND}\n</tool_call>", ""),
        (f"<seed:tool_call>\n{TAGGED_FIND}\n</seed:tool_call>", ""),
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
    "glm4": [
        ('find\n{"city": "Ulm"}', "required text one"),
        ('find \n{"city": "Ulm", "n": 2}', "required text one"),
        ('\nfind_all\n\n{"q": [1]}', "text one"),
        ("just text", "text one"),
        ("find\nthe {city}", "text one"),
        ('find\n{"n": 1}', ""),
        ('so find\n{"n": 1}', "text one"),
        ('delete\n{"city": "Ulm"}', "text one"),
    ],
    "glm45": [
        (GLM45_FIND, "required text one"),
        (f"{GLM45_FIND}\n{GLM45_ALL}", "required text"),
        ("just text", "text one"),
        (f"I call {GLM45_ALL}", "text one"),
        (GLM45_FIND.replace("Ulm", "Rome"), ""),
        ("<tool_call>find\n</tool_call>", ""),
        ("<tool_call>find_all\n</tool_call>", "required text one"),
        (GLM45_FIND.replace("city", "n"), ""),
        (GLM45_FIND.replace("</arg_value>", "</arg_value></arg_value>"), ""),
    ],
    "olmo3": [
        ('<function_calls>find(city="Ulm")</function_calls>', "required text one"),
        (
            '<function_calls>\nfind(city="Ulm", n=2)\nfind_all(q=[1], r=null)\n</function_calls>',
            "required text",
        ),
        ("f(x) is text", "text one"),
        ("I call <function_calls>find_all()</function_calls>", "text one"),
        ('<function_calls>find("Ulm")</function_calls>', ""),
        ('<function_calls>find(n=2, city="Ulm")</function_calls>', ""),
        ("<function_calls>find(n=2)</function_calls>", ""),
        ('<function_calls>find(city="Rome")</function_calls>', ""),
        ('<function_calls>find(city="Ulm",)</function_calls>', ""),
        ('<function_calls>find(city="Ulm")', ""),
    ],
    "gemma3": [
        ('```tool_code\nfind(city="Ulm")\n```', "required text one"),
        ('```tool_code\nfind(city="Ulm")\nfind_all(q=[1], r=null)\n```', "required text"),
        ("```python\nfind(city)\n```", "text one"),
        ("I call\n```tool_code\nfind_all()\n```", "text one"),
        ("```tool_code\nfind(n=2)\n```", ""),
        ("```tool_code\nprint(find(city='Ulm'))\n```", ""),
        ('```tool_code\nfind(city="Rome")\n```', ""),
    ],
    "gemma4": [
        (GEMMA4_FIND, "required text one"),
        (f"{GEMMA4_FIND}{GEMMA4_ALL}", "required text"),
        ("just {text}", "text one"),
        (f"I call {GEMMA4_ALL}", "text one"),
        (GEMMA4_FIND.replace("Ulm", "Rome"), ""),
        (GEMMA4_FIND.replace("}", ',n:<|"|>2<|"|>}'), ""),
        (GEMMA4_FIND.replace("}", ",n:2}"), "required text one"),
        (GEMMA4_FIND.replace('<|"|>', '"'), ""),
        ("<|tool_call>call:find{}<tool_call|>", ""),
        ("<|tool_call>call:find_all{}<tool_call|>", "required text one"),
        (GEMMA4_FIND.replace("call:find", "find"), ""),
    ],
    "cohere2": [
        (f"<|START_ACTION|>[\n    {COHERE2_FIND}\n]<|END_ACTION|>", "required text one"),
        (f"<|START_ACTION|>[{COHERE2_FIND},\n    {COHERE2_ALL}]<|END_ACTION|>", "required text"),
        (f"I call <|START_ACTION|>[{COHERE2_FIND}]<|END_ACTION|>", "text one"),
        (f"<|START_ACTION|>[{COHERE2_FIND.replace('city', 'n')}]<|END_ACTION|>", ""),
        (f"<|START_ACTION|>[{FIND}]<|END_ACTION|>", ""),
        (f"<|START_ACTION|>[{COHERE2_FIND}]", ""),
    ],
}
