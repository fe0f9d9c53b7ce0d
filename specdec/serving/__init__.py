"""An OpenAI-compatible HTTP server around one engine on a thread of its own."""
