"""Small chat templates in the shapes of public families, in words of our own: what stands around calls and thoughts.

Facts: the templates beside the families' weights, as of November 2026. A family's own texts for tools are left out.
"""

# ruff: noqa: E501, RUF001

from typing import NamedTuple


class Family(NamedTuple):
    template: str
    begins: str  # what stands before an answer
    ends: str  # what stands behind it, which no answer has
    special: tuple[str, ...] = ()  # tokens that are special
    most_calls: int = 2
    has_thoughts: bool = False
    has_content: bool = True  # beside calls


ML = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}CALLS<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = ML.replace(
    "CALLS",
    """{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}
</tool_call>{% endfor %}""",
)
CODER = ML.replace(
    "CALLS",
    """{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
)
GLM = """[gMASK]<sop>{% if tools %}<|system|>
{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% elif m.role == 'assistant' %}<|assistant|>
<think>{{ m.reasoning_content or '' }}</think>{% if m.content %}
{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK = """<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '' if loop.first else '\n' }}<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% else %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
DEEPSEEK_31 = """<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% else %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"""
DSML = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content or '' }}{% if m.tool_calls %}

<｜DSML｜function_calls>
{% for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">{{ v if v is string else v | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜function_calls>{% endif %}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
HARMONY = """{% if tools %}<|start|>developer<|message|>{% for t in tools %}type {{ t.function.name }}{% endfor %}<|end|>{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
MISTRAL = """<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ '' if loop.last else ', ' }}{% endfor %}]</s>{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
MISTRAL_11 = """<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}</s>{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
LLAMA = """<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
PYTHONIC = """{% if tools %}<|header_start|>system<|header_end|>

{{ tools | tojson }}<|eot|>{% endif %}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>

{% if m.tool_calls %}<|python_start|>[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]<|python_end|>{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
BARE_PYTHONIC = PYTHONIC.replace("<|python_start|>", "").replace("<|python_end|>", "")
MINIMAX = """{% if tools %}]~!b[]~b]system
{{ tools | tojson }}[e~[
{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% if m.tool_calls %}
<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% else %}]~b]{{ m.role }}
{{ m.content }}[e~[
{% endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
GRANITE = """{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>
{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
GEMMA = """<bos>{% macro value(v, q) %}{% if v is string %}{{ q }}{{ v }}{{ q }}{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ value(x, q) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% elif v is boolean or v is none %}{{ v | tojson }}{% elif v is iterable %}[{% for x in v %}{{ value(x, q) }}{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}{% if tools %}<start_of_turn>developer
{% for t in tools %}<start_function_declaration>declaration:{{ t.function.name }}<end_function_declaration>{% endfor %}<end_of_turn>
{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments.items() %}{{ k }}:{{ value(v, '<escape>') }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}<end_function_call>{% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
GEMMA_4 = (
    GEMMA.replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<escape>", '<|"|>')
)
HUNYUAN = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|hy_{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}<tool_calls>
{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```
</tool_call>
{% endfor %}</tool_calls>{% endif %}<|hy_eos|>{% endfor %}{% if add_generation_prompt %}<|hy_assistant|>{% endif %}"""

_THOUGHT, _WORDS = (HERMES.index(part) for part in ("{% if m.role == 'assistant' and", "{{ m.content or '' }}"))
QWEN_25 = HERMES[:_THOUGHT] + HERMES[_WORDS:]
GLM_47 = GLM.replace(
    """{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}""",
    """{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}""",
)
DEEPSEEK_32 = DSML.replace(
    "<｜Assistant｜>{{ m",
    "<｜Assistant｜>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m",
)
MAGISTRAL = MISTRAL_11.replace(
    "{% elif m.role == 'assistant' %}",
    "{% elif m.role == 'assistant' %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}",
)
SEED = """{% if tools %}<seed:bos>system
{{ tools | tojson }}<seed:eos>{% endif %}{% for m in messages %}<seed:bos>{{ m.role }}
{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<seed:tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>
{% endfor %}</function>
</seed:tool_call>{% endfor %}<seed:eos>{% endfor %}{% if add_generation_prompt %}<seed:bos>assistant
{% endif %}"""
LFM = PYTHONIC.replace("<|python_start|>", "<|tool_call_start|>").replace(
    "<|python_end|>", "<|tool_call_end|>{{ m.content or '' }}"
)
PHI = """{% for m in messages %}<|{{ m.role }}|>{% if tools and loop.first %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ '' if loop.last else ', ' }}{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
APERTUS = PHI.replace(_CALL, '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}')
INTERN = PHI.replace("<|tool_call|>[{%", "{%").replace(_CALL, f"<|start|><|plugin|>\n{_CALL}<|stop|>")
INTERN = INTERN.replace("{{ '' if loop.last else ', ' }}", "").replace("]<|/tool_call|>", "")
GEMMA_4_THOUGHTS = GEMMA_4.replace(
    "{{ m.content or '' }}{% for c",
    "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}{{ m.content or '' }}{% for c",
)

_CALLS_OF_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_CALLS_OF_DEEPSEEK += ("<｜tool▁calls▁end｜>",)
_CALLS_OF_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>")
_CALLS_OF_KIMI += ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")

FAMILIES = {
    "Hermes, Qwen": Family(HERMES, *_CHATML, has_thoughts=True),
    "Qwen3-Coder, Qwen3.5": Family(CODER, *_CHATML, has_thoughts=True),
    "Qwen, special marks": Family(HERMES, *_CHATML, ("<tool_call>", "</tool_call>", "<think>", "</think>"), 2, True),
    "GLM-4.5": Family(GLM, "<|assistant|>", "", has_thoughts=True),
    "DeepSeek V3": Family(DEEPSEEK, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", _CALLS_OF_DEEPSEEK, has_content=False),
    "DeepSeek V3.1": Family(DEEPSEEK_31, "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>", _CALLS_OF_DEEPSEEK),
    "DeepSeek V3.2": Family(DSML, "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gpt-oss": Family(HARMONY, "<|start|>assistant", "", _CHANNELS, 1, True, has_content=False),
    "Mistral v3": Family(MISTRAL, "[/INST]", "</s>", ("[TOOL_CALLS]",), has_content=False),
    "Mistral v11": Family(MISTRAL_11, "[/INST]", "</s>", ("[TOOL_CALLS]", "[ARGS]")),
    "Llama 3.1": Family(LLAMA, "assistant<|end_header_id|>\n\n", "<|eot_id|>", (), 1, has_content=False),
    "Llama 4": Family(PYTHONIC, "assistant<|header_end|>\n\n", "<|eot|>", ("<|python_start|>",), has_content=False),
    "Llama 3.2": Family(BARE_PYTHONIC, "assistant<|header_end|>\n\n", "<|eot|>", has_content=False),
    "MiniMax M2": Family(MINIMAX, "]~b]ai\n", "[e~[\n", has_thoughts=True),
    "Kimi K2": Family(KIMI, "assistant<|im_middle|>", "<|im_end|>", _CALLS_OF_KIMI),
    "Granite 3": Family(GRANITE, "assistant<|end_of_role|>", "<|end_of_text|>\n", ("<|tool_call|>",)),
    "FunctionGemma": Family(GEMMA, "<start_of_turn>model\n", "<end_of_turn>\n"),
    "Gemma 4": Family(GEMMA_4, "<start_of_turn>model\n", "<end_of_turn>\n", ("<|tool_call>", "<tool_call|>")),
    "Qwen2.5": Family(QWEN_25, *_CHATML),
    "GLM-4.7": Family(GLM_47, "<|assistant|>", "", has_thoughts=True),
    "DeepSeek V3.2, thoughts": Family(DEEPSEEK_32, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", has_thoughts=True),
    "Magistral": Family(
        MAGISTRAL, "[/INST]", "</s>", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), has_thoughts=True
    ),
    "Seed-OSS": Family(
        SEED, "<seed:bos>assistant\n", "<seed:eos>", ("<seed:tool_call>", "</seed:tool_call>"), has_thoughts=True
    ),
    "LFM2": Family(
        LFM, "assistant<|header_end|>\n\n", "<|eot|>", ("<|tool_call_start|>", "<|tool_call_end|>"), has_content=False
    ),
    "Phi-4": Family(PHI, "<|assistant|>", "<|end|>", ("<|tool_call|>", "<|/tool_call|>")),
    "Apertus": Family(APERTUS, "<|assistant|>", "<|end|>", ("<|tool_call|>", "<|/tool_call|>")),
    "InternLM": Family(INTERN, "<|assistant|>", "<|end|>", ("<|start|>", "<|plugin|>", "<|stop|>")),
    "Gemma 4, thoughts": Family(
        GEMMA_4_THOUGHTS,
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
        has_thoughts=True,
    ),
    "Hunyuan": Family(HUNYUAN, "<|hy_assistant|>", "<|hy_eos|>"),
}
