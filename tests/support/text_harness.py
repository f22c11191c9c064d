"""Chat templates in the style of each model family, and a tokenizer unlike that of `gateway_harness`."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERMES = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
LLAMA3 = """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.tool_calls %}{% for call in message.tool_calls %}{% if not loop.first %}; {% endif %}\
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}\
{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"""
MISTRAL = """{% for message in messages %}{% if message.reasoning_content %}[THINK]\
{{ message.reasoning_content }}[/THINK]{% endif %}{{ message.content }}{% if message.tool_calls %}\
[TOOL_CALLS][{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}\
{% endfor %}]{% endif %}{% endfor %}"""
MISTRAL_NAMED = """{% for message in messages %}{{ message.content }}\
{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}\
[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
QWEN3_CODER = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{% if value is mapping or (value is sequence and value is not string) %}{{ value | tojson }}\
{% else %}{{ value | string }}{% endif %}

</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
SEED_OSS = """{% for message in messages %}<seed:bos>{{ message.role }}
{% if message.reasoning_content %}<seed:think>{{ message.reasoning_content }}</seed:think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<seed:tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\
{% if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}</parameter>
{% endfor %}</function>
</seed:tool_call>{% endfor %}<seed:eos>{% endfor %}"""
GLM45 = """{% for message in messages %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments | items %}<arg_key>{{ name }}</arg_key>
<arg_value>{% if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endfor %}"""
# This template knows no calls, and has the name of one and its result in turns of their own.
GLM4 = """{% for message in messages %}{% set meta = message.get('metadata', '') %}\
{% if message.role == 'observation' %}<|observation|>
{{ message.content }}{% elif meta %}<|assistant|>{{ meta }} \n{{ message.content }}\
{% else %}<|{{ message.role }}|>
{{ message.content }}{% endif %}{% endfor %}"""
# Nor do those of Granite 3, SmolLM3 and Gemma 3; the first two say in words how to call.
GRANITE = """{% if tools %}respond only with <|tool_call|> followed by a JSON list of tools used. \
{{ tools | tojson }}{% endif %}\
{% if thinking %}between <think></think> and between <response></response>{% endif %}\
{% for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}\
<|end_of_text|>
{% endfor %}"""
SMOLLM3 = """{% if tools %}an object within <tool_call></tool_call> tags {{ tools | tojson }}{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}"""
GEMMA3 = """{% set turns = messages[1:] if messages[0].role == 'system' else messages %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles alternate') }}{% endif %}<start_of_turn>{{ message.role }}
{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}{{ message.content }}<end_of_turn>
{% endfor %}"""
PHI4 = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and \
message['tools'] is not none %}<|system|>{{ message.content }}<|tool|>{{ message.tools }}<|/tool|><|end|>\
{% else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}"""
APERTUS = """{% for message in messages %}<|{{ message.role }}_start|>{% if message.reasoning_content %}\
<|inner_prefix|>{{ message.reasoning_content }}<|inner_suffix|>{% endif %}{{ message.content }}\
{% if message.tool_calls %}<|tools_prefix|>[{% for call in message.tool_calls %}\
{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}\
{% endfor %}]<|tools_suffix|>{% endif %}<|{{ message.role }}_end|>{% endfor %}"""
OLMO3 = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{{ message.content }}{% if message.tool_calls %}<function_calls>{% for call in message.tool_calls %}\
{{ call.function.name }}({% for name, value in call.function.arguments | items %}{{ name }}=\
{{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}{{ '\n' }}\
{% endif %}{% endfor %}</function_calls>{% endif %}<|im_end|>
{% endfor %}"""
COHERE2 = """{% for message in messages %}<|START_OF_TURN_TOKEN|><|{{ message.role }}_TOKEN|>\
{% if message.reasoning_content %}<|START_THINKING|>{{ message.reasoning_content }}<|END_THINKING|>\
{% endif %}\
{% if message.role != 'assistant' %}{{ message.content }}\
{% elif message.content %}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>{% endif %}\
{% if message.tool_calls %}<|START_ACTION|>[{% for call in message.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters": \
{{ call.function.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}
]<|END_ACTION|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"""
GEMMA4 = """{% macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is boolean %}\
{{ 'true' if value else 'false' }}{% elif value is mapping %}{{ '{' }}{% for key, it in value | dictsort %}\
{{ key }}:{{ shown(it) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}\
{% elif value is sequence %}[{% for it in value %}{{ shown(it) }}{% if not loop.last %},{% endif %}\
{% endfor %}]{% else %}{{ value }}{% endif %}{% endmacro %}\
{% for message in messages %}<|turn>{{ message.role }}
{% if message.reasoning_content %}<|channel>thought
{{ message.reasoning_content }}
<channel|>{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}\
<|tool_call>call:{{ call.function.name }}{{ shown(call.function.arguments) }}<tool_call|>{% endfor %}<turn|>
{% endfor %}"""
# As gpt-oss: one call a turn, reasoning that is dropped where a final message follows, and none beside text.
HARMONY = """{% if reasoning_effort is defined %}<|start|>system<|message|>Reasoning: {{ reasoning_effort }}\
<|end|>{% endif %}{% set called = namespace(name='') %}{% for message in messages %}\
{% if message.role == 'developer' or message.role == 'system' %}{% if loop.first %}\
<|start|>developer<|message|>{{ message.content }}<|end|>{% endif %}\
{% elif message.role == 'assistant' and 'tool_calls' in message %}\
{% if message.content and message.thinking %}{{ raise_exception('text beside thinking') }}{% endif %}\
{% set later = namespace(is_final=false) %}{% for other in messages[loop.index:] %}\
{% if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.is_final = true %}{% endif %}\
{% endfor %}{% set thought = message.thinking or message.content %}{% if thought and not later.is_final %}\
<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}\
{% set call = message.tool_calls[0].function %}{% set called.name = call.name %}\
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>\
{{ call.arguments | tojson }}<|call|>{% elif message.role == 'assistant' %}\
{% if loop.last and message.thinking %}<|start|>assistant<|channel|>analysis<|message|>\
{{ message.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}\
{{ '<|return|>' if loop.last else '<|end|>' }}{% elif message.role == 'tool' %}\
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>\
{{ message.content | tojson }}<|end|>{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}\
<|end|>{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'assistant' %}\
<|start|>assistant{% endif %}"""
FAMILIES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_NAMED,
    "qwen3 coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "glm45": GLM45,
    "glm4": GLM4,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "gemma3": GEMMA3,
    "phi4": PHI4,
    "apertus": APERTUS,
    "olmo3": OLMO3,
    "gemma4": GEMMA4,
    "cohere2": COHERE2,
    "harmony": HARMONY,
}
# What the template writes before an answer, and behind it.
TURN_STARTS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<seed:bos>assistant\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<start_of_turn>assistant\n",
    "<|assistant_start|>",
    "<|turn>assistant\n",
    "<|START_OF_TURN_TOKEN|><|assistant_TOKEN|>",
    "<|assistant|>\n",
    "<|assistant|>",
    "<|start|>assistant",
)
TURN_ENDS = (
    "<|im_end|>\n",
    "<|eot_id|>",
    "<seed:eos>",
    "<|end_of_text|>\n",
    "<end_of_turn>\n",
    "<|assistant_end|>",
    "<turn|>\n",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)


def train_byte_fallback() -> Tokenizer:
    """As Llama 2's and Mistral's: words with a leading mark, and one token for each byte."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], show_progress=False, limit_alphabet=40
    )
    tokenizer.train_from_iterator(["the quick brown fox abab", "a bab ab\n"], trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for token in bytes_as_tokens:
        vocab.setdefault(token, len(vocab))
    return Tokenizer.from_str(json.dumps(state))
