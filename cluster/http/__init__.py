"""The gateway's HTTP: one way to listen, and the APIs of OpenAI and Anthropic over the calls of gRPC."""
