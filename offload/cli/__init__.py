"""The command line: flags, bars and pictures on the terminal, the chat loop, the packaged demo."""
