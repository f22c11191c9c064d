"""From text to tokens and back: validation, chat templates, tokenizer, preprocessing."""
