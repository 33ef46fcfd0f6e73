"""An engine behind OpenAI's completions and chat API; needs the extra `serve`."""
