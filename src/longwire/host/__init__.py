"""llama.cpp as the program that uses devices: models, contexts, sampling."""
