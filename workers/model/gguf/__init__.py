"""GGUF files, turned into folders in Hugging Face layout once per host (`workers.model.model_folder`).
No torch."""
