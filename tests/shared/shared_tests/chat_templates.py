"""Small chat templates with the structure of those of model families: the same markers, order and conditions."""

from __future__ import annotations

from dataclasses import dataclass

QWEN_TOOLS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
QWEN_TOOL_MESSAGE = """\
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
HERMES_CALLS = """\
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}"""
QWEN25 = (
    QWEN_TOOLS
    + """\
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}"""
    + HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + QWEN_TOOL_MESSAGE
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
LAST_QUERY = """\
{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.found = true %}{%- set ns.query = messages | length - loop.index %}
{%- endif %}
{%- endfor %}"""
REASONING = """\
{%- set content = m.content %}{%- set reasoning = m.reasoning_content or '' %}
{%- if '</think>' in content and not reasoning %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}"""
QWEN3 = (
    QWEN_TOOLS
    + LAST_QUERY
    + """\
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}"""
    + REASONING
    + """\
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}"""
    + HERMES_CALLS.replace("m.content", "content")
    + "{{- '<|im_end|>\\n' }}"
    + QWEN_TOOL_MESSAGE
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)
QWEN35 = (
    QWEN_TOOLS
    + LAST_QUERY
    + """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}"""
    + REASONING
    + """\
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content | trim }}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content | trim) %}{{ '\\n\\n' }}{% elif not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}"""
    + QWEN_TOOL_MESSAGE
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
)
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nReply with {"name": function name, "parameters": ...}\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one tool call') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content | trim + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set turns = messages %}{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}
{{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """\
{{- '<s>' }}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m is sameas last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content | trim + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
{{- raise_exception('a result without a call') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{% endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}
{{- m.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}
{{- m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- endif %}
{%- endfor %}"""
GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<|' + m.role + '|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}"""
GLM += REASONING
GLM += """\
{{- '<|assistant|>' }}
{%- if reasoning %}{{ '\\n<think>' + reasoning.strip() + '</think>' }}{% endif %}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
GPT_OSS = """\
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- set last = namespace(tool=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('channels are keys') }}{% endif %}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
{%- if m.tool_calls %}
{%- if m.thinking and not later %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- set last.tool = m.tool_calls[0].function.name %}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if last.tool is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.tool + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template, and what its models write."""

    template: str
    special: tuple[str, ...]
    """Special tokens."""
    end: str
    """Token that ends a reply."""
    format: str = "none"
    call: str = ""
    """A reply with the call `add(a=1, b=2)`, as the template writes it."""
    other_call: str = ""
    """The same call with other white space or keys in another order of the format."""
    call_end: str = ""
    """Token that ends a reply with a tool call; default: `end`."""
    ordinary: tuple[str, ...] = ()
    """Tokens of the vocabulary that are not special."""
    thought: str = ""
    """Reasoning before a reply, as the model writes it."""


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        QWEN25, _IM, "<|im_end|>", "hermes", _HERMES, '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
    ),
    "qwen3": Family(
        QWEN3,
        _IM,
        "<|im_end|>",
        "hermes",
        _HERMES,
        '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
        ordinary=_TAGS,
        thought="<think>\nadd them\n</think>\n\n",
    ),
    "qwen3.5": Family(
        QWEN35,
        _IM,
        "<|im_end|>",
        "qwen3_coder",
        "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "</think>\n<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
        ordinary=_TAGS,
        thought="add them\n</think>\n\n",
    ),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<|python_tag|>{"name":"add","parameters":{"a":1,"b":2}}',
    ),
    "gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call00000"}]',
        '[TOOL_CALLS][{"name":"add","arguments":{"a":1,"b":2}}]',
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
         "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
         "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        "<｜end▁of▁sentence｜>",
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a":1,"b":2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ordinary=("<think>", "</think>"),
        thought="<think>\nadd them\n</think>\n\n",
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|user|>",
        "glm45",
        "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"
        "</tool_call>",
        call_end="<|observation|>",
        ordinary=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        thought="\n<think>add them</think>\n",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|return|>",
        "harmony",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"b":2}',
        call_end="<|call|>",
        thought="<|channel|>analysis<|message|>add them<|end|><|start|>assistant",
    ),
}  # fmt: skip
