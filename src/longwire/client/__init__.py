"""The calling side: remote devices that ggml drives like local ones."""
