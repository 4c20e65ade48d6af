"""What commands share: options, setup, input, output and errors."""
