"""Models in llama.cpp's file format: what a file announces, and the folder transformers reads in its place."""
