"""Models in llama.cpp's format: one GGUF file that holds the configuration, the tokenizer and the weights."""
