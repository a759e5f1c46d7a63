"""Sessions over UDP and over queue pairs, in a guest of the kernel lab."""
