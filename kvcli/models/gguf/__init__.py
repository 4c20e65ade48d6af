"""Models in llama.cpp's GGUF format: file headers, and conversion to a folder that transformers reads."""
