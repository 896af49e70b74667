"""The decoder family: models that predict the next token, from Llama to DeepSeek-V3."""
