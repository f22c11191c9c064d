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
FAMILIES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_NAMED,
    "qwen3 coder": QWEN3_CODER,
}


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
