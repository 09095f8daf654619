"""Train strategy on Hugging Face models."""
