"""From a path to text: loading, the decoder and its step, runs, requests, chats."""
