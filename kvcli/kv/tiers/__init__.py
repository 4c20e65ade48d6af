"""One kind of storage on one device each: dense, quantized, host, disk."""
