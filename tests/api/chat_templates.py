"""Chat templates in the styles of well-known models, which use what such templates use of Jinja."""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2025" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{#- The first message may be the system's; it is taken out. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: shell\\n" }}{% endif %}
{{- "Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
{%- endif %}
{{- system_message }}{{ "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Tools need a first user message.") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call of one of:\\n\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("One call at once.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif default_system is not defined or default_system %}
    {{- '<|im_start|>system\\nYou help people.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.searching %}{% break %}{% endif %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
            {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("User and assistant must take turns, and the user begins.") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- macro one(tool) %}
    {{- '{"type": "function", "function": {' }}
    {%- for key, val in tool.items() if key != "return" %}
        {%- set shown = '"' + val + '"' if val is string else val | tojson %}
        {{- '"' + key + '": ' + shown }}
        {%- if not loop.last %}{{ ", " }}{% endif %}
    {%- endfor %}
    {{- "}}" }}
{%- endmacro %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{ one(tool.function) }}{{ ", " if not loop.last else "]" }}{% endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("The id of a call has 9 characters.") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant, system and tool are known.") }}
    {%- endif %}
{%- endfor %}
"""

# What the others leave out: messages as they stand, fields that may be missing, thoughts by another name.
OTHER = """\
{% for message in messages %}
    {% if loop.first and tools %}
{{ tools | length }} tools: {{ tools | map(attribute='function.name') | join(', ') }}
    {% endif %}
{{ bos_token if bos_token is defined }}[{{ message.role | upper }}{{ ' ' ~ message.name if message.name is defined }}]
{% generation %}
{{ message.content if message.content is defined else 'nothing' }}{{ eos_token }}
{% endgeneration %}
    {%- if message.thinking %} ({{ message.thinking | length }} of {{ message.thinking.split(' ')[0] }}){% endif %}
{% endfor %}
{{ notes | tojson(sort_keys=true, separators=(',', ':')) if notes is defined }}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""

TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "other": OTHER}
