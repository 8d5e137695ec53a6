"""The OpenAI API as text: request models, the error envelope, streams, responses. No sockets, no engine."""
