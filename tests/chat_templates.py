"""Chat templates for tests."""

# As Qwen2.5 and Hermes write them: tools in the system turn, calls as JSON in tags, results together in a user turn.
TOOL_TEMPLATE = """
{%- macro said(content) -%}
  {%- if content is string -%}{{ content }}{%- else -%}{%- for p in content -%}{{ p.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' -%}{{- said(messages[0].content) + '\\n\\n' }}{%- endif -%}
  {{- '# Functions\\n<tools>' }}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) }}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + said(messages[0].content) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
    {{- '<|im_start|>' + message.role + '\\n' + said(message.content) + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant' }}
    {%- if said(message.content) -%}{{- '\\n' + said(message.content) }}{%- endif -%}
    {%- for call in message.tool_calls -%}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor -%}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' }}{%- endif -%}
    {{- '\\n<tool_response>\\n' + said(message.content) + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""
