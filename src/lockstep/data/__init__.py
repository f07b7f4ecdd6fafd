"""Which sample, in which step, on which rank; and how it gets to the device."""
