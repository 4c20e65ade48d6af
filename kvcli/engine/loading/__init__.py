"""Loading weights: formats, quantization, devices and limits."""
