"""Moving keys and values between a device and host memory."""
