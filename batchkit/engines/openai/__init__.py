"""An engine that uses a server with OpenAI's API."""
