"""Train strategy for Hugging Face models (`hf_train`)."""
