"""Transfer of keys and values between a device and host memory, and attention to offloaded slots."""
