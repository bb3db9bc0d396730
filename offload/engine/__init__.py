"""From a path to text: loading, the decoder and its steps, runs, requests and chats."""
