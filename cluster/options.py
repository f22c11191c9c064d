"""The client's options under their old import path, kept until API v1; new code imports from `cluster`."""

from cluster.api.client import GenerateOptions, Prompt, Turn, chat_prompt, generate_request
from cluster.proto import APPLICATION_KEY

__all__ = ["APPLICATION_KEY", "GenerateOptions", "Prompt", "Turn", "chat_prompt", "generate_request"]
