"""Where every byte goes. No torch."""
