"""The server with the routes of OpenAI."""
