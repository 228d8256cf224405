"""Text in and out of token ids: tokenizer, incremental detokenizer, chat prompts, parser of chat output.

Pure Python over tiktoken and `k3svc.errors`; nothing here knows of tensors, services or the wire.
"""
