"""A model that an agent can work with: it thinks, calls tools in Hermes' form, and answers behind their results."""

from pathlib import Path

from tiny import save_reciter

THOUGHT, SAYING, ANSWER = "Hm, weather.", "Let me see.", "It is 21 degrees."
CITIES = ("Paris", "Oslo")
_CALLS = [f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>' for city in CITIES]
# What it writes hangs on the last character of its prompt: ':' thinks, speaks and calls, '|' calls twice, ';' answers.
_THINKING = (":", "<think>", "Hm,", " weather.", "</think>", "Let me", " see.", *_CALLS[:1])
_TWICE = ("|", "\n" + _CALLS[0], "\n" + _CALLS[1])
_ANSWERING = (";", "It is", " 21", " degrees.")
TEMPLATE = (
    "{% if tools %}TOOLS{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{% if enable_thinking is false %} quick{% endif %}"
    "{{ ';' if messages[-1].role == 'tool' else '|' if 'both' in messages[-1].content else ':' }}{% endif %}"
)


def save_agent(folder: Path) -> Path:
    """Save it."""
    return save_reciter(folder, _THINKING, _TWICE, _ANSWERING, ends=True, chat_template=TEMPLATE)
