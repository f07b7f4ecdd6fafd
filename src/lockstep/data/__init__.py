"""Training and held-out data: the order of samples, reading them, copying to the device."""
