"""llama.cpp as the host: model, context, tokens, sampling, generation."""
