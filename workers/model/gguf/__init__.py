"""GGUF files, turned into folders in Hugging Face layout once per host (`workers.model.gguf.model_folder`).
No torch."""
