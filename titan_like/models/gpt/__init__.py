"""GPT family."""
