"""A model without weights: a tokenizer trained on Python's own library, a chat template with tools, and a config."""

import json
import sysconfig
from base64 import b64encode
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 16_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # tokens 0, 1 and 2
TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
END = SPECIAL.index("<|im_end|>")
TEMPLATE = """\
{%- set first = messages[0] %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if first.role == 'system' %}{{ first.content + '\\n\\n' }}{% endif %}
{{- 'You may call these functions:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>"],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
    "chat_template": TEMPLATE,
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": END,
}


PICTURE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")  # the tokens after all others
SHOWN = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
VISION: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vocab_size": VOCABULARY + len(PICTURE),
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "vision_start_token_id": VOCABULARY,
    "image_token_id": VOCABULARY + 1,
    "vision_end_token_id": VOCABULARY + 2,
    "video_token_id": VOCABULARY + 3,
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 448 * 448}


def save_elsewise(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the same vocabulary as Mistral's own tokenizers have it, and as tiktoken's files do."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as ByteLevel shows them
    others = (byte for byte in range(256) if byte not in plain)
    shown = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    named = sorted((id, token) for token, id in tokenizer.get_vocab().items() if token not in SPECIAL)
    words = [bytes(shown[letter] for letter in token) for _, token in named]
    words = [bytes([byte]) for byte in range(256)] + [word for word in words if len(word) > 1]
    encoded = [b64encode(word).decode() for word in words]
    tekken, tiktoken = folder / "tekken", folder / "tiktoken"
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(TEKKEN_SPECIAL)]
    config = {
        "pattern": r" ?[^\s]+|\s+",
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v7",
    }
    vocabulary = [{"rank": i, "token_bytes": word, "token_str": None} for i, word in enumerate(encoded)]
    tekken.mkdir(exist_ok=True)
    (tekken / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    added = {str(len(words) + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
    tiktoken.mkdir(exist_ok=True)
    (tiktoken / "tiktoken.model").write_text("".join(f"{word} {i}\n" for i, word in enumerate(encoded)))
    (tiktoken / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def make(folder: Path) -> None:
    """Write the model's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_elsewise(tokenizer, folder)
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    tokenizer.add_special_tokens([*PICTURE])
    tokenizer.save(str(pictures / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", TOKENIZER),
        ("config.json", CONFIG),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": END}),
        ("pictures/tokenizer_config.json", TOKENIZER | {"chat_template": SHOWN}),
        ("pictures/config.json", CONFIG | VISION),
        ("pictures/preprocessor_config.json", PROCESSOR),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))
