"""What a training job imports."""
